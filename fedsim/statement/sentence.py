"""Sentences of the privacy statement: each has a condition on facts, a heading and a text.

`fedsim.accountant.trust.OBSERVERS` lists the observers against whom a trust model has a guarantee.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from fedsim.accountant.trust import Observer
from fedsim.core.errors import FedsimError
from fedsim.statement.facts import Facts

# claim: proved; fact: recorded; limit: not covered by a claim; warning: to be read first
Kind = Literal["claim", "fact", "limit", "warning"]
Holds = Callable[[Facts], bool]
# A text, or a text with the values in it, unrounded and by name, for programs.
Said = str | tuple[str, Mapping[str, Any]]
Words = Callable[[Facts], Said]


class UnsupportedClaimError(FedsimError, ValueError):
    """Error raised by building a sentence that the recorded facts do not support."""


@dataclass(frozen=True)
class Sentence:
    """One sentence of the privacy statement, as in `privacy.json`.

    Guarantee: only a template (`Row`) makes a sentence, and only from facts that support it.
    """

    id: str
    point: str  # the part of the statement that lists the sentence, such as "guarantee"
    kind: Kind
    title: str  # heading on a page
    text: str
    values: dict[str, Any]  # those in the text, unrounded and by name, for programs


@dataclass(frozen=True)
class Row:
    """Template of a `Sentence`; `holds` says whether facts support it, `words` makes its text."""

    identifier: str
    point: str
    kind: Kind
    title: str
    holds: Holds
    words: Words

    def __call__(self, facts: Facts) -> Sentence:
        """Return the sentence; if the facts do not support it, raise `UnsupportedClaimError`."""
        name = self.identifier
        if not self.holds(facts):
            raise UnsupportedClaimError(f"the facts do not support the sentence {name!r}")
        said = self.words(facts)
        text, values = (said, {}) if isinstance(said, str) else said
        return Sentence(name, self.point, self.kind, self.title, text, dict(values))


is_bounded: Holds = attrgetter("is_bounded")  # as most sentences require
is_private: Holds = attrgetter("is_private")


def is_charged(facts: Facts) -> bool:
    """Whether clients were charged for private releases; ε may still be infinite."""
    return facts.is_private and facts.has_charges


def of_sums(facts: Facts) -> bool:
    """Whether the trust is distributed, so that observers see sums of uploads."""
    return facts.trust.trust == "distributed"


class StatementTable(list[Row]):
    """A list of sentence templates, in the order of the statement."""

    def sentence(
        self,
        point: str,
        kind: Kind,
        title: str,
        *,
        name: str | None = None,
        holds: Holds = is_bounded,
        when: Holds = lambda facts: True,
    ) -> Callable[[Words], Row]:
        """Return a decorator that adds a template to this list, from a function of facts to words.

        The id of the sentence is `name`, or else the name of the function. Facts must meet both
        conditions, `holds` and `when`.
        """

        def add(words: Words) -> Row:
            identifier = name or words.__name__
            row = Row(identifier, point, kind, title, lambda f: holds(f) and when(f), words)
            self.append(row)
            return row

        return add

    def fixed(
        self, point: str, kind: Kind, name: str, title: str, text: str, **conditions: Holds
    ) -> None:
        """Add a template with a fixed text; `conditions` are `holds` and `when` of `sentence`."""
        self.sentence(point, kind, title, name=name, **conditions)(lambda facts: text)


# Each observer, as worded after "against". A claim against one covers all that follow it.
OBSERVER_NAMES: Mapping[Observer, str] = {
    "server": "a server that sees every update",
    "sums": "an observer of sums",
    "models": "an observer of global models",
}


@dataclass(frozen=True)
class View:
    """Phrases on the adversary against whom a run's ε holds, and on what it sees."""

    observer: str  # as worded after "against"
    sees: str  # as worded after "An attacker sees"
    releases: str  # what one ε covers, followed by the verb "are"
    adversary: str  # a sentence without its full stop: the adversary, and all that it sees


_UPDATES = {
    "local": View(
        OBSERVER_NAMES["server"],
        "all updates of one client",
        "the updates of each client k over all of its rounds, taken together, are",
        "The adversary is the server, or any other party that sees every update of a client",
    ),
    "distributed": View(
        f"{OBSERVER_NAMES['sums']}, who sees no single update",
        "every sum of updates and every global model",
        "all sums and all global models of the run, taken together, are",
        "The adversary sees every sum of updates that is opened, and every global model, the final "
        "one included",
    ),
    "central": View(
        f"{OBSERVER_NAMES['models']}, who sees neither updates nor sums without noise",
        "every global model",
        "all global models of the run, taken together, are",
        "The adversary sees every global model, the final one included",
    ),
}
_VIEW_OF_SUMS = View(
    f"{OBSERVER_NAMES['sums']}, who sees the noisy sums of votes and no single client's votes",
    "every noisy sum of votes, every answer and the student",
    "all noisy sums of votes, all answers and the student, taken together, are",
    "The adversary sees every noisy sum of votes, every answer and the student",
)
_VOTES = {
    "local": View(
        "a server that sees the noisy votes of every client",
        "all noisy votes of one client",
        "the noisy votes of each client k over all ballots, taken together, are",
        "The adversary is the server, or any other party that sees every noisy vote of a client",
    ),
    "distributed": _VIEW_OF_SUMS,
    "central": replace(
        _VIEW_OF_SUMS,
        observer="an observer of the answers, who sees neither votes nor sums without noise",
    ),
}


def view_of(facts: Facts) -> View:
    """Return the phrases on the adversary against whom the run's ε holds."""
    return (_VOTES if facts.counts_votes else _UPDATES)[facts.trust.trust]


def core_text(facts: Facts) -> str:
    """Return a clause that states the guarantee of a run with symbols ε and δ, not their values."""
    view, is_local = view_of(facts), facts.trust.trust == "local"
    unit = "each of its training examples" if is_local else "each training example of each client k"
    if facts.protects_clients:
        unit = f"everything that {'client' if is_local else 'any client'} k has"
    return f"against {view.observer}, {view.releases} (ε_k, δ)-differentially private for {unit}"


def question_of(facts: Facts) -> str:
    """Return the question that an attacker tries to answer, in words."""
    if facts.protects_clients:
        return "whether one given client trained on its data"
    whose = "its" if facts.trust.trust == "local" else "a client's"
    return f"whether one given example was in {whose} training data"
