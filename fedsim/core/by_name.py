"""Catalogues whose entries are imported when they are chosen."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")


class ByName(Mapping[str, T], Generic[T]):
    """Things of one kind by name; looking one up imports its module, and no other.

    Args:
        places: "package.module:attribute" of each by its name, in the order of the catalogue. The
            architecture's test reads these places as imports.
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
