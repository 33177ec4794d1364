"""Words for the observer, the releases and the unit of each of the six cells."""

from dataclasses import dataclass

from fedsim.statement.facts import Facts


@dataclass(frozen=True)
class View:
    """What one observer sees.

    Attributes:
        observer: the observer, after "against".
        sees: what an attacker sees, after "An attacker sees".
        releases: the releases that one ε covers, with their verb.
    """

    observer: str
    sees: str
    releases: str


_VIEWS = {
    "local": View(
        "a server that sees every update",
        "all updates of one client",
        "the updates of each client k over all of its rounds are together",
    ),
    "distributed": View(
        "an observer of sums, who sees no single update",
        "every sum of updates and every global model",
        "all sums and all global models of the run are together",
    ),
    "central": View(
        "an observer of global models, who sees neither updates nor sums without noise",
        "every global model",
        "all global models of the run are together",
    ),
}


_VOTE_VIEWS = {
    "local": View(
        "a server that sees the noisy votes of every client",
        "all noisy votes of one client",
        "the noisy votes of each client k over all ballots are together",
    ),
    "distributed": View(
        "an observer of sums, who sees the noisy sums of votes and no single client's votes",
        "every noisy sum of votes, every answer and the student",
        "all noisy sums of votes, all answers and the student are together",
    ),
    "central": View(
        "an observer of the answers, who sees neither votes nor sums without noise",
        "every noisy sum of votes, every answer and the student",
        "all noisy sums of votes, all answers and the student are together",
    ),
}


def view_of(facts: Facts) -> View:
    """Return the words of the view that the run's ε is claimed for."""
    return (_VOTE_VIEWS if facts.counts_votes else _VIEWS)[facts.trust.trust]


def core_text(facts: Facts) -> str:
    """Return the guarantee of a run without its figures, without capital and full stop."""
    view, is_local = view_of(facts), facts.trust.trust == "local"
    if facts.protects_clients:
        unit = f"everything that {'client' if is_local else 'any client'} k has"
    elif is_local:
        unit = "each of its training examples"
    else:
        unit = "each training example of each client k"
    return f"against {view.observer}, {view.releases} (ε_k, δ)-differentially private for {unit}"


def question_of(facts: Facts) -> str:
    """Return what an attacker guesses."""
    if facts.protects_clients:
        return "whether one given client trained on its data"
    if facts.trust.trust == "local":
        return "whether one given example was in its training data"
    return "whether one given example was in a client's training data"
