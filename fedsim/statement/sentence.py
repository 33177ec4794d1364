"""The base class of all sentences: built from facts, refused where the facts do not support it."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedsim.core.errors import FedsimError
from fedsim.statement.facts import Facts

Kind = Literal["claim", "fact", "limit", "warning"]
"""claim: what is proved; fact: what ran; limit: where the claim ends; warning: read this first."""


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
