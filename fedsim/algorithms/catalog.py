"""The built-in algorithms by name; the algorithm NAME is in the file `built_in/NAME.py`."""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from fedsim.algorithms import built_in
from fedsim.algorithms.algorithm import Algorithm
from fedsim.core.imports import ByName


class _Algorithms(ByName[type[Algorithm]]):
    def __getitem__(self, name: str) -> type[Algorithm]:
        module = import_module(self.places[name])
        kinds = (value for value in vars(module).values() if isinstance(value, type))
        (kind,) = (kind for kind in kinds if issubclass(kind, Algorithm) and kind.name == name)
        return kind


@cache
def algorithms() -> Mapping[str, type[Algorithm]]:
    """Return the built-in algorithm classes by name, in alphabetical order."""
    modules = pkgutil.iter_modules(built_in.__path__)
    names = sorted(module.name for module in modules)
    return _Algorithms({name: f"{built_in.__name__}.{name}" for name in names})
