"""Sentences of the privacy statement: each has a condition on facts, a heading and a text.

Several sentences, and the tools, name an adversary (observer) and say what it sees under each trust
model. `fedsim.accountant.trust.OBSERVERS` lists the observers against whom a trust model has a
guarantee.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedsim.accountant.trust import Observer
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
class Sentence:
    """One sentence of the privacy statement, as in `privacy.json`.

    Guarantee: only a template (`Row`) makes a sentence, and only from facts that support it.

    Attributes:
        id: name of the sentence in files.
        point: the part of the statement that lists the sentence, such as "guarantee".
        kind: claim, fact, limit or warning.
        title: heading of the sentence on a page.
        text: the sentence.
        values: the values in the text, unrounded and by name, for programs.
    """

    id: str
    point: str
    kind: Kind
    title: str
    text: str
    values: dict[str, Any]


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

    def __call__(self, facts: Facts) -> Sentence:
        """Return the sentence for facts.

        Raises:
            UnsupportedClaimError: the facts do not support the sentence.
        """
        if not self.holds(facts):
            raise UnsupportedClaimError(
                f"the facts do not support the sentence {self.identifier!r}"
            )
        said = self.words(facts)
        text, values = (said, {}) if isinstance(said, str) else said
        return Sentence(self.identifier, self.point, self.kind, self.title, text, dict(values))


def is_bounded(facts: Facts) -> bool:
    """Whether clients were charged and a finite ε may be stated, as most sentences require."""
    return facts.is_bounded


def is_private(facts: Facts) -> bool:
    """Whether the experiment has differential privacy; ε may still be infinite."""
    return facts.is_private


def is_charged(facts: Facts) -> bool:
    """Whether clients were charged for private releases; ε may still be infinite."""
    return facts.is_private and facts.has_charges


def of_sums(facts: Facts) -> bool:
    """Whether the trust is distributed, so that observers see sums of uploads."""
    return facts.trust.trust == "distributed"


def of_clients(facts: Facts) -> bool:
    """Whether the privacy unit is the client."""
    return facts.protects_clients


class StatementTable(list[Row]):
    """A list of sentence templates, in the order of the statement."""

    def sentence(
        self,
        point: str,
        kind: Kind,
        title: str,
        *,
        holds: Holds = is_bounded,
        when: Holds = lambda facts: True,
    ) -> Callable[[Words], Row]:
        """Return a decorator that adds a template to this list, from a function of facts to words.

        The name of the function is the id of the sentence in files.

        Args:
            point: part of the statement that lists the sentence, such as "guarantee".
            kind: claim, fact, limit or warning.
            title: heading of the sentence on a page.
            holds: function that returns whether facts support the sentence; by default, whether
                there is a guarantee.
            when: a further condition, which the facts must meet as well.
        """

        def add(words: Words) -> Row:
            row = Row(words.__name__, point, kind, title, lambda f: holds(f) and when(f), words)
            self.append(row)
            return row

        return add


OBSERVER_NAMES: Mapping[Observer, str] = {
    "server": "a server that sees every update",
    "sums": "an observer of sums",
    "models": "an observer of global models",
}
"""Each observer, as worded after "against". A claim against one covers all that follow it."""


@dataclass(frozen=True)
class View:
    """Phrases on the adversary against whom a run's ε holds, and on what it sees.

    Attributes:
        observer: the adversary, as worded after "against".
        sees: what the adversary sees, as worded after "An attacker sees".
        releases: words for the releases that one ε covers, followed by the verb "are".
        adversary: a sentence without its full stop: the adversary, and all that it sees.
    """

    observer: str
    sees: str
    releases: str
    adversary: str


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
    if facts.protects_clients:
        unit = f"everything that {'client' if is_local else 'any client'} k has"
    elif is_local:
        unit = "each of its training examples"
    else:
        unit = "each training example of each client k"
    return f"against {view.observer}, {view.releases} (ε_k, δ)-differentially private for {unit}"


def question_of(facts: Facts) -> str:
    """Return the question that an attacker tries to answer, in words."""
    if facts.protects_clients:
        return "whether one given client trained on its data"
    if facts.trust.trust == "local":
        return "whether one given example was in its training data"
    return "whether one given example was in a client's training data"
