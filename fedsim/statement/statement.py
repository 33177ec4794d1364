"""All sentences that the facts of a run allow, in the order in which a reviewer asks."""

import math
from collections.abc import Sequence
from typing import Any

from fedsim.statement import claims, conduct, guarantee, limits, mechanism, secure
from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence

SENTENCES: tuple[type[Sentence], ...] = (
    *guarantee.SENTENCES,
    *claims.SETTING,
    *mechanism.SENTENCES,
    *claims.RESULT,
    *secure.RESULT,
    *secure.FACTS,
    *conduct.SENTENCES,
    *limits.SENTENCES,
    *secure.LIMITS,
)

# What `in_words` joins: enough to quote an ε with.
_WORDS = ("guarantee", "adjacency", "sampling", "accounting", "limit")


def statement_of(facts: Facts) -> tuple[Sentence, ...]:
    """Return every sentence that the facts support."""
    return tuple(sentence(facts) for sentence in SENTENCES if sentence.holds(facts))


def in_words(sentences: Sequence[Sentence]) -> str:
    """Return the core of a statement as one paragraph, to quote beside an ε."""
    return " ".join(
        sentence.text
        for sentence in sentences
        if sentence.point in _WORDS or sentence.kind == "warning"
    )


def to_json(facts: Facts) -> dict[str, Any]:
    """Return what `privacy.json` says in words and in figures of these facts.

    The profile is there only where a finite ε may be stated.
    """
    sentences = statement_of(facts)
    return {
        "statement": in_words(sentences),
        "statement_points": [sentence.to_json() for sentence in sentences],
        "profile": _profile_json(facts),
    }


def _profile_json(facts: Facts) -> dict[str, Any] | None:
    profile = facts.profile
    if not facts.bounded or profile is None:
        return None
    every = max(1, math.ceil(len(profile.curve) / 40))
    return {
        "client": profile.client,
        "epsilon": profile.epsilon,
        "delta": profile.delta,
        "curve": [list(point) for point in profile.curve[::every]],
        "mu": profile.mu,
        "slack": profile.slack,
        "attack": [list(point) for point in profile.attack],
    }
