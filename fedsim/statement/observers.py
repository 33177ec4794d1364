"""Phrases that describe each adversary (observer) and what it sees, under each trust model.

The privacy statement and the tools print these. `fedsim.accountant.trust.OBSERVERS` lists the
observers against whom a trust model has a guarantee.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fedsim.accountant.trust import Observer
from fedsim.statement.facts import Facts

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
_SUMS_OF_VOTES = "every noisy sum of votes, every answer and the student"
_VOTES = {
    "local": View(
        "a server that sees the noisy votes of every client",
        "all noisy votes of one client",
        "the noisy votes of each client k over all ballots, taken together, are",
        "The adversary is the server, or any other party that sees every noisy vote of a client",
    ),
    "distributed": View(
        f"{OBSERVER_NAMES['sums']}, who sees the noisy sums of votes and no single client's votes",
        _SUMS_OF_VOTES,
        "all noisy sums of votes, all answers and the student, taken together, are",
        f"The adversary sees {_SUMS_OF_VOTES}",
    ),
    "central": View(
        "an observer of the answers, who sees neither votes nor sums without noise",
        _SUMS_OF_VOTES,
        "all noisy sums of votes, all answers and the student, taken together, are",
        f"The adversary sees {_SUMS_OF_VOTES}",
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
