"""Sentences of the privacy statement: each has a condition on facts, a heading and a text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fedsim.core.errors import FedsimError
from fedsim.statement.facts import Facts

Kind = Literal["claim", "fact", "limit", "warning"]
"""claim: proved; fact: recorded; limit: not covered by a claim; warning: to be read first."""

Holds = Callable[[Facts], bool]
Said = str | tuple[str, Mapping[str, Any]]
"""A text, or a text with the values in it, unrounded and by name, for programs."""
Words = Callable[[Facts], Said]


class UnsupportedClaimError(FedsimError, ValueError):
    """Error raised by building a sentence that the recorded facts do not support."""


@dataclass(frozen=True)
class Row:
    """Template of a sentence of the statement; a call with facts returns the sentence.

    Attributes:
        identifier: id of the sentence in files.
        point: the part of the statement to which the sentence belongs, such as "guarantee".
        kind: claim, fact, limit or warning.
        title: heading of the sentence on a page.
        holds: function that returns whether facts support the sentence.
        words: function from facts to the text, or to the text and the values in it.
    """

    identifier: str
    point: str
    kind: Kind
    title: str
    holds: Holds
    words: Words

    def __call__(self, facts: Facts) -> "Sentence":
        """Return the sentence for facts.

        Raises:
            UnsupportedClaimError: the facts do not support the sentence.
        """
        return Sentence(self, facts)


@dataclass(frozen=True)
class Sentence:
    """One sentence of the privacy statement, made from a template (`row`) and facts.

    Guarantee: if the facts do not support the sentence, no object is created, so that there is no
    text.

    Raises:
        UnsupportedClaimError: the facts do not support the sentence.
    """

    row: Row
    facts: Facts

    def __post_init__(self) -> None:
        if not self.row.holds(self.facts):
            raise UnsupportedClaimError(
                f"the facts do not support the sentence {self.row.identifier!r}"
            )

    @property
    def point(self) -> str:
        """The part of the statement that lists the sentence, such as "guarantee"."""
        return self.row.point

    @property
    def kind(self) -> Kind:
        """The kind of the sentence: a claim, a fact, a limit or a warning."""
        return self.row.kind

    @property
    def title(self) -> str:
        """Heading of the sentence on a page."""
        return self.row.title

    @property
    def text(self) -> str:
        """The text of the sentence."""
        return self._text_and_values[0]

    @cached_property
    def _text_and_values(self) -> tuple[str, Mapping[str, Any]]:
        said = self.row.words(self.facts)
        return (said, {}) if isinstance(said, str) else said

    def to_json(self) -> dict[str, Any]:
        """Return the sentence's entry in `privacy.json`."""
        return {
            "id": self.row.identifier,
            "point": self.point,
            "kind": self.kind,
            "title": self.title,
            "text": self.text,
            "values": dict(self._text_and_values[1]),
        }


def is_bounded(facts: Facts) -> bool:
    """Whether clients were charged and a finite ε may be stated, as most sentences require."""
    return facts.is_bounded


def is_private(facts: Facts) -> bool:
    """Whether the experiment has differential privacy; ε may still be infinite."""
    return facts.is_private


class StatementTable(list[Row]):
    """A list of sentence templates, in the order of the statement."""

    def sentence(
        self,
        point: str,
        kind: Kind,
        title: str,
        *,
        holds: Holds = is_bounded,
    ) -> Callable[[Words], Row]:
        """Return a decorator that adds a template to this list, from a function of facts to words.

        The name of the function is the id of the sentence in files.

        Args:
            point: part of the statement that lists the sentence, such as "guarantee".
            kind: claim, fact, limit or warning.
            title: heading of the sentence on a page.
            holds: function that returns whether facts support the sentence; by default, whether
                there is a guarantee.
        """

        def add(words: Words) -> Row:
            self.append(Row(words.__name__, point, kind, title, holds, words))
            return self[-1]

        return add
