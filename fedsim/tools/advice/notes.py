"""Notes of the advice: what the candidates leave open, and their changes as YAML lines."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from fedsim.core.formatting import epsilon_text
from fedsim.experiment import LoadedExperiment
from fedsim.federation.federation import Federation
from fedsim.planning.cells import plan_cell
from fedsim.tools.advice.ranking import PROPOSAL, Ranked, Ranking


def yaml_lines(changes: Mapping[str, Any]) -> str:
    """Return the settings as YAML, one section a line where it fits; empty without changes.

    Args:
        changes: `{"key.path": value}`.
    """
    tree: dict[str, Any] = {}
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    if not tree:
        return ""
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, allow_unicode=True)


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
    yield from _trust(federation, ranking, rows, best)


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


def _trust(
    federation: Federation, ranking: Ranking, rows: Sequence[Ranked], best: Ranked
) -> Iterator[str]:
    """Yield the gain of distributed trust at the schedule of a candidate with one local step."""
    yield "trust: every candidate protects each upload by its own noise (local)"
    one_step = [row for row in rows if row.candidate.steps == 1]
    row = best if best in one_step else min(one_step, key=lambda one: one.error, default=best)
    also = {**row.changes, **_sums(federation)}
    loaded = LoadedExperiment(federation.experiment, None, federation.base)
    cell = plan_cell(loaded, federation, "distributed", "example", also=also)
    if cell.reason is not None:
        yield f"distributed trust cannot run here: {cell.reason.partition(';')[0]}"
        return
    shares = {one.client: one.noise_multiplier for one in cell.clients}
    noise = np.array([shares[int(client)] for client in ranking.facts.members])
    ratio = ranking.with_noise(row, noise) / row.error
    limits = [cell.epsilon(observer) for observer in ("sums", "server")]
    sums, server = ("infinite" if one is None else epsilon_text(one) for one in limits)
    lines = yaml_lines({"privacy.trust": "distributed", **_sums(federation)}).splitlines()
    if ratio < _WORTH_SAYING:
        yield (
            f"distributed trust, with the schedule {row.name!r}: × {ratio:.2g} of its predicted "
            f"noise-to-signal ratio, for ε = {sums} against who sees sums, and {server} against a "
            f"server that breaks secure aggregation: set {'; '.join(lines)}"
        )


def _sums(federation: Federation) -> dict[str, Any]:
    """Return the settings of sums that distributed trust needs and the file lacks."""
    secure = federation.experiment.secure_aggregation
    per_round, _ = federation.plan.participation.round_sizes
    if secure is None:
        return {"secure_aggregation": {"aggregators": 2, "min_clients": per_round}}
    if "min_clients" not in secure.model_fields_set:
        return {"secure_aggregation.min_clients": per_round}
    return {}
