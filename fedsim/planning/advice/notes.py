"""Notes of the advice: what the candidates leave open, in words."""

from collections.abc import Iterator, Sequence

from fedsim.federation.federation import Federation
from fedsim.planning.advice.ranking import PROPOSAL, Ranked, Ranking

_WORTH_SAYING = 0.9  # of the proposal's predicted error


def notes_of(federation: Federation, ranking: Ranking, rows: Sequence[Ranked]) -> Iterator[str]:
    """Yield sentences about samplings, trained values and trust.

    Args:
        federation: of the file.
        ranking: gives predicted errors.
        rows: the finalists.
    """
    best = next((row for row in rows if row.name == PROPOSAL), rows[0])
    if best.rates == (1.0, 1.0):
        yield "sampling: at a sampling rate of 1 every privacy.sampling gives the same lots"
    yield from _fewer_values(ranking, best)
    yield _trust(federation)


def _fewer_values(ranking: Ranking, best: Ranked) -> Iterator[str]:
    facts = ranking.facts
    linear = (facts.inputs + 1) * facts.outputs
    if linear >= facts.trained_values:
        return
    ratio = ranking.with_values(best, linear) / best.error
    if ratio < _WORTH_SAYING:
        yield (
            f"fewer trained values: noise grows with their number, {facts.trained_values:,} here; "
            f"a linear model has {linear:,}, for × {ratio:.2g} of the predicted noise-to-signal "
            "ratio, if it can tell the classes apart: try model.name: logistic on fixed features "
            "(model.features)"
        )


def _trust(federation: Federation) -> str:
    if federation.experiment.secure_aggregation is None:
        return (
            "trust: every candidate protects each upload by its own noise (local); "
            "secure_aggregation would hide single uploads, and lowers no noise"
        )
    return (
        "trust: secure_aggregation hides single uploads, and the report's aggregate view states "
        "what that is worth; noise is planned for each upload alone, so no candidate has less of it"
    )
