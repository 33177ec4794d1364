"""The sentences of the privacy statement, by part of the page."""

from collections.abc import Sequence

from fedsim.statement import Sentence

_TITLES = {
    "threat model": "Threat model",
    "unit": "Unit of privacy",
    "adjacency": "Neighbours",
    "mechanism": "Mechanism",
    "sampling": "Sampling",
    "accounting": "Accounting",
    "delta": "Choice of δ",
    "result": "Result",
    "attack": "Meaning",
    "budget": "Budgets",
    "data access": "Access to data",
    "recomputation": "Evidence",
}


def guarantees(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the sentences of the guarantee: claims only, never a warning."""
    return [s for s in sentences if s.point == "guarantee" and s.kind == "claim"]


def warnings(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the warnings."""
    return [sentence for sentence in sentences if sentence.kind == "warning"]


def limits(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the limits of the guarantee."""
    return [sentence for sentence in sentences if sentence.kind == "limit"]


def points(sentences: Sequence[Sentence]) -> list[tuple[str, list[Sentence]]]:
    """Return the other points of the statement, each with its sentences, in their order."""
    found: dict[str, list[Sentence]] = {}
    for sentence in sentences:
        if sentence.point in _TITLES and sentence.kind in ("claim", "fact"):
            found.setdefault(sentence.point, []).append(sentence)
    return [(title, found[point]) for point, title in _TITLES.items() if point in found]
