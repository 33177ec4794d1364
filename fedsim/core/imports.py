"""Lazy imports by name, and imports without garbage collection.

Garbage collection takes a sixth of the time of a command's imports.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")


class ByName(Mapping[str, T], Generic[T]):
    """A catalogue of objects by name; looking an object up imports only that object's module.

    Args:
        places: "package.module:attribute" of each object by its name, in the order of the
            catalogue. The architecture's test reads these places as imports.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self.places[name].partition(":")
        return getattr(import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection in the block, and exclude all existing objects from it afterwards.

    Imports create half a million objects that all stay, and the collector would visit them again
    and again. Only main programs may use it: a caller's garbage would stay, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
