"""The base class of all sentences: built from facts, refused where the facts do not support it."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedsim.core.errors import FedsimError
from fedsim.statement.facts import Facts

Kind = Literal["claim", "fact", "limit", "warning"]
"""claim: what is proved; fact: what ran; limit: where the claim ends; warning: read this first."""

_MAX_NAMED_CLIENTS = 10


class UnsupportedClaimError(FedsimError, ValueError):
    """A sentence that the facts do not support."""


@dataclass(frozen=True)
class Sentence(ABC):
    """One sentence of the privacy statement.

    Guarantee: an object exists only if `holds(facts)`, and only an object has a text.

    Attributes:
        point: the point of the statement under which the sentence is listed.
        title: its heading on a page.

    Raises:
        UnsupportedClaimError: the facts do not support the sentence.
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
        """Whether the facts support the sentence."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The sentence in words."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Every number of the text, unrounded, for programs."""
        return {}

    @classmethod
    def identifier(cls) -> str:
        """Return the sentence's id in files: `attack_bound` for `AttackBoundSentence`."""
        name = cls.__name__.removesuffix("Sentence")
        return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()

    def to_json(self) -> dict[str, Any]:
        """Return the sentence's entry in `privacy.json`."""
        return {
            "id": self.identifier(),
            "point": self.point,
            "kind": self.kind,
            "title": self.title,
            "text": self.text,
            "values": dict(self.values),
        }


def clients_text(clients: Sequence[int]) -> str:
    """Return clients by number, at most ten of them: `clients 1, 2 and 5 more`."""
    word = "client" if len(clients) == 1 else "clients"
    shown = ", ".join(str(client) for client in clients[:_MAX_NAMED_CLIENTS])
    more = len(clients) - _MAX_NAMED_CLIENTS
    return f"{word} {shown}" + (f" and {more:,} more" if more > 0 else "")


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1: `1 round`, `2 rounds`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def range_text(values: Sequence[float], digits: int = 4) -> str:
    """Return the range of values in words, rounded to `digits` digits: `0.5`, `0.1 to 0.9`."""
    low, high = (f"{value:.{digits}g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
