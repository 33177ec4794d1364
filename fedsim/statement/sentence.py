"""What a sentence is: words built from facts, which refuse to exist where the facts do not hold."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedsim.core.errors import FedsimError
from fedsim.statement.facts import Facts

Kind = Literal["claim", "fact", "limit", "warning"]
"""claim: what is proved; fact: what ran; limit: where the claim ends; warning: do not miss it."""

_NAMED_CLIENTS = 10


class UnsupportedClaimError(FedsimError, ValueError):
    """A sentence that the facts do not support."""


@dataclass(frozen=True)
class Sentence(ABC):
    """One thing to say about the privacy of a run.

    Guarantee: an object exists only if `holds(facts)`; there is no other way to its text.

    Raises:
        UnsupportedClaimError: the facts do not support it.
    """

    facts: Facts

    point: ClassVar[str]
    kind: ClassVar[Kind]
    title: ClassVar[str]

    def __post_init__(self) -> None:
        if not self.holds(self.facts):
            raise UnsupportedClaimError(
                f"the facts do not support the sentence {self.identifier()!r}"
            )

    @classmethod
    @abstractmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether the facts support the sentence."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The sentence in words."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The same for programs: every number of the text, unrounded."""
        return {}

    @classmethod
    def identifier(cls) -> str:
        """Return the name of the sentence in files: `largest_epsilon`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def to_json(self) -> dict[str, Any]:
        """Return the sentence as it stands in `privacy.json`."""
        return {
            "id": self.identifier(),
            "point": self.point,
            "kind": self.kind,
            "title": self.title,
            "text": self.text,
            "values": dict(self.values),
        }


def named(clients: Sequence[int]) -> str:
    """Return clients in words, up to ten of them by number: `clients 1, 2 and 5 more`."""
    word = "client" if len(clients) == 1 else "clients"
    shown = ", ".join(str(client) for client in clients[:_NAMED_CLIENTS])
    more = len(clients) - _NAMED_CLIENTS
    return f"{word} {shown}" + (f" and {more:,} more" if more > 0 else "")


def counted(number: int, thing: str) -> str:
    """Return a number with its thing, in the plural where needed: `1 round`, `2 rounds`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def span(values: Sequence[float], digits: int = 4) -> str:
    """Return the range of values in words: `0.5`, or `0.1 to 0.9`."""
    low, high = (f"{value:.{digits}g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
