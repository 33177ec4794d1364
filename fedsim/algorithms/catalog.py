"""The built-in algorithms by name, found in `built_in/`: a new one is a file there."""

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

from fedsim.algorithms import built_in
from fedsim.algorithms.algorithm import Algorithm


@cache
def algorithms() -> Mapping[str, type[Algorithm]]:
    """Return the class of each built-in algorithm by its name, in alphabetical order."""
    return dict(sorted((kind.name, kind) for kind in _found()))


def _found() -> Iterator[type[Algorithm]]:
    for module in pkgutil.iter_modules(built_in.__path__, f"{built_in.__name__}."):
        for value in vars(import_module(module.name)).values():
            is_own = isinstance(value, type) and value.__module__ == module.name
            if is_own and issubclass(value, Algorithm) and value.name:
                yield value
