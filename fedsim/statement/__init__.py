"""The privacy statement of a run: sentences that can only be built from facts that support them.

`read_facts` turns `privacy.json` and facts from the run's other files into typed facts.
`statement_of` returns all sentences that those facts support. Building any other sentence raises
`UnsupportedClaimError`, so no caller can print a claim that does not hold.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedsim.accountant.attack_bound import Profile as Profile
from fedsim.core.text_formats import json_value
from fedsim.statement import guarantee, limits, mechanism, result
from fedsim.statement.attack import AttackBound as AttackBound
from fedsim.statement.attack import profile_of as profile_of
from fedsim.statement.facts import ClientFacts as ClientFacts
from fedsim.statement.facts import Facts as Facts
from fedsim.statement.facts import MechanismFacts as MechanismFacts
from fedsim.statement.facts import RunFacts as RunFacts
from fedsim.statement.privacy_file import read_facts as read_facts
from fedsim.statement.sentence import Row, Sentence
from fedsim.statement.sentence import UnsupportedClaimError as UnsupportedClaimError

SENTENCES: tuple[Row, ...] = (*guarantee.TABLE, *mechanism.TABLE, *result.TABLE, *limits.TABLE)
_CORE_POINTS = ("guarantee", "adjacency", "sampling", "accounting", "limit")  # beside a quoted ε
_MAX_JSON_POINTS = 40


def statement_of(facts: Facts) -> tuple[Sentence, ...]:
    """Return all sentences that the facts support, in the order of the statement."""
    return tuple(row(facts) for row in SENTENCES if row.holds(facts))


def in_words(sentences: Sequence[Sentence]) -> str:
    """Return the main sentences of the statement as one paragraph, to quote beside an ε."""
    return " ".join(
        sentence.text
        for sentence in sentences
        if sentence.point in _CORE_POINTS or sentence.kind == "warning"
    )


def to_json(facts: Facts) -> dict[str, Any]:
    """Return the privacy statement as a dictionary of top-level entries of `privacy.json`.

    The entries `profile` and `attack` are None if no finite ε can be stated.
    """
    sentences, profile = statement_of(facts), None
    if facts.is_bounded and facts.profile is not None:
        step = max(1, math.ceil(len(facts.profile.curve) / _MAX_JSON_POINTS))
        profile = json_value(replace(facts.profile, curve=facts.profile.curve[::step]))
    return {
        "statement": in_words(sentences),
        "statement_points": [vars(sentence) for sentence in sentences],
        "certificates": guarantee.certificates_of(facts),
        "profile": profile,
        "attack": json_value(facts.attack) if facts.is_bounded else None,
    }
