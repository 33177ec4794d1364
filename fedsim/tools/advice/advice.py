"""Advice on an experiment: candidate settings, ranked by predicted error, with notes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.core.commands import Phases
from fedsim.core.formatting import count_text, epsilon_text
from fedsim.core.text_formats import json_value
from fedsim.experiment import LoadedExperiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.planning.alternatives import plan_cell
from fedsim.planning.projection import budget_refusal
from fedsim.report.terminal import figure_table, print_sentence, print_table
from fedsim.tools.advice import why_not_advised
from fedsim.tools.advice.candidates import PublicFacts
from fedsim.tools.advice.noise import PLAUSIBLE_TASKS
from fedsim.tools.advice.ranking import PROPOSAL, Ranked, Ranking, predicted_error, weighting_text

_WORTH_SAYING = 0.9  # of the proposal's predicted error
_CLEAR_GAIN = 0.95  # of the file's predicted error
_JSON_FACTS = ("trained_values", "inputs", "outputs", "label_skew")
_JSON_ROW = (
    *("name", "changes", "rounds", "steps", "learning_rate", "weighting", "sampling_rate"),
    *("noise_multiplier", "noise_is_exact", "noise_to_signal", "ratio", "ratio_range"),
)


def yaml_lines(changes: Mapping[str, Any]) -> str:
    """Return changed settings as YAML, with one line per section if possible."""
    tree: dict[str, Any] = {}
    for path, value in changes.items():
        section, _, key = path.partition(".")
        tree[section] = {**tree.get(section, {}), key: value} if key else value
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, allow_unicode=True)


def notes_of(federation: Federation, facts: PublicFacts, rows: Sequence[Ranked]) -> Iterator[str]:
    """Yield the notes of the advice: on sampling, number of trained parameters and trust models."""
    best = next((row for row in rows if row.name == PROPOSAL), rows[0])
    if best.sampling_rate == (1.0, 1.0):
        yield "sampling: at a sampling rate of 1 every privacy.sampling gives the same batches"
    linear = (facts.inputs + 1) * facts.outputs
    smaller = replace(facts, trained_values=linear)
    ratio = predicted_error(best.candidate, best.all_noise, smaller) / best.noise_to_signal
    if linear < facts.trained_values and ratio < _WORTH_SAYING:
        yield (
            f"fewer trained values: noise grows with their number, {facts.trained_values:,} here; "
            f"a linear model has {linear:,}, for × {ratio:.2g} of the predicted noise-to-signal "
            "ratio, if it can tell the classes apart: try model.name: logistic on fixed features "
            "(model.features)"
        )
    yield from _trust(federation, facts, rows, best)


def _trust(
    federation: Federation, facts: PublicFacts, rows: Sequence[Ranked], best: Ranked
) -> Iterator[str]:
    """Yield a note on the gain of distributed trust, for a candidate with one local step."""
    yield "trust: every candidate protects each upload by its own noise (local)"
    one_step = [row for row in rows if row.candidate.steps == 1]
    row = min(one_step, key=lambda row: (row is not best, row.noise_to_signal), default=best)
    sums = _sums(federation)
    loaded = LoadedExperiment(federation.experiment, None, federation.base)
    cell = plan_cell(loaded, federation, "distributed", "example", also={**row.changes, **sums})
    if cell.reason is not None:
        yield f"distributed trust cannot run here: {cell.reason.partition(';')[0]}"
        return
    shares = {client.client: client.noise_multiplier for client in cell.clients}
    clients = zip(facts.members, row.all_noise, strict=True)
    noise = np.array([shares.get(client, own) for client, own in clients])  # own: no round
    ratio = predicted_error(row.candidate, noise, facts) / row.noise_to_signal
    limits = [cell.epsilon(observer) for observer in ("sums", "server")]
    seen, server = ("infinite" if limit is None else epsilon_text(limit) for limit in limits)
    lines = yaml_lines({"privacy.trust": "distributed", **sums}).splitlines()
    if ratio < _WORTH_SAYING:
        yield (
            f"distributed trust, with the schedule {row.name!r}: × {ratio:.2g} of its predicted "
            f"noise-to-signal ratio, for ε = {seen} against who sees sums, and {server} against a "
            f"server that breaks secure aggregation: set {'; '.join(lines)}"
        )


def _sums(federation: Federation) -> dict[str, Any]:
    """Return the secure-aggregation settings that distributed trust needs and the file lacks."""
    secure = federation.experiment.secure_aggregation
    per_round, _ = federation.plan.participation.round_sizes
    if secure is None:
        return {"secure_aggregation": {"aggregators": 2, "min_clients": per_round}}
    if "min_clients" not in secure.model_fields_set:
        return {"secure_aggregation.min_clients": per_round}
    return {}


@dataclass(frozen=True)
class Advice:
    """The advice on one experiment: candidate settings, compared without reading any example."""

    facts: PublicFacts  # from which errors are predicted
    rows: tuple[Ranked, ...]  # to show: the file's settings, the proposal if any, others
    compared: int  # number of all candidates, also of those not shown
    notes: tuple[str, ...]  # about settings that no candidate changes
    refusal: str | None = None  # why `fedsim run` refuses the file

    @property
    def proposal(self) -> Ranked | None:
        """The best candidate if clearly better than the file; correlated noise must beat all."""
        best = next((row for row in self.rows if row.name == PROPOSAL), self.rows[0])
        limit = _CLEAR_GAIN * best.noise_to_signal
        correlated = (row for row in self.rows if row.candidate.correlation is not None)
        best = next((row for row in correlated if row.noise_to_signal < limit), best)
        return best if best.ratio < _CLEAR_GAIN else None

    @property
    def lines(self) -> str:
        """The settings that the proposal changes, as YAML lines; "" without a proposal."""
        return "" if self.proposal is None else yaml_lines(self.proposal.changes)

    def to_json(self) -> dict[str, Any]:
        """Return the advice as a JSON value; infinite numbers are null."""
        facts = self.facts
        candidates = [{**vars(row.candidate), **vars(row)} for row in self.rows]
        return json_value(
            {
                "facts": {
                    "clients": facts.num_clients,
                    "examples": [int(n) for n in facts.examples],
                    "epsilon": facts.epsilons.tolist(),
                    **{key: getattr(facts, key) for key in _JSON_FACTS},
                },
                "compared": self.compared,
                "tasks": len(PLAUSIBLE_TASKS),
                "candidates": [{key: row[key] for key in _JSON_ROW} for row in candidates],
                "proposal": None if self.proposal is None else self.proposal.changes,
                "yaml": self.lines,
                "notes": self.notes,
                "refusal": self.refusal,
            }
        )


def advise_experiment(loaded: LoadedExperiment, *, phases: Phases | None = None) -> Advice:
    """Return advice on an experiment, without training; of the data, only sizes are used."""
    if why_not := why_not_advised(loaded.experiment):
        raise PrivacyPlanError(why_not)
    phases = phases or Phases()
    federation = assemble(loaded, ledger=None, phases=phases)
    phases.begin("comparing schedules")
    ranking = Ranking(federation)
    rows = tuple(ranking.ranked())
    advice = Advice(
        facts=ranking.facts,
        rows=rows,
        compared=len(ranking.candidates),
        notes=tuple(notes_of(federation, ranking.facts, rows)),
        refusal=budget_refusal(federation),
    )
    phases.end()
    return advice


def print_advice(advice: Advice) -> None:
    """Print the candidates, the settings to change, the predicted gain and the notes."""
    console = Console()
    table = figure_table(
        "Candidates at the same ε, by predicted noise-to-signal ratio",
        ["q", "z", "steps", "lr", "× file", "between"],
        texts=["candidate", "weights"],
    )
    for row in advice.rows:
        candidate, (low, high) = row.candidate, row.ratio_range
        table.add_row(
            f"→ {row.name}" if row is advice.proposal else row.name,
            weighting_text(candidate.weighting),
            _range(row.sampling_rate),
            ("" if row.noise_is_exact else "≈") + _range(row.noise_multiplier),
            f"{candidate.rounds} × {candidate.steps}",
            f"{candidate.learning_rate:g}",
            f"{row.ratio:.2f}",
            f"{low:.2f}–{high:.2f}",
        )
    table.caption = (
        "q: sampling rate; z: noise multiplier; steps: rounds × local steps\n"
        "≈: without a search; for correlated noise, independent noise of equal error\n"
        "× file: predicted noise-to-signal ratio, over that of the file\n"
        f"between: least and largest on {len(PLAUSIBLE_TASKS)} plausible learning tasks"
    )
    print_table(console, table)
    if (proposal := advice.proposal) is None:
        none = f"none of {advice.compared:,} candidates is clearly better"
        print_sentence(console, f"nothing to change: {none}")
    else:
        low, high = proposal.ratio_range
        print_sentence(
            console,
            f"proposal, the best of {count_text(advice.compared, 'candidate')}: predicted "
            f"noise-to-signal ratio × {proposal.ratio:.2g}, between × {low:.2g} and × {high:.2g}; "
            "change these lines:",
        )
        console.print(advice.lines.rstrip(), highlight=False, markup=False, soft_wrap=True)
    public = "no example was read, no training was done, no file was changed"
    for note in (*advice.notes, f"from public figures alone: {public}"):
        print_sentence(console, note)


def _range(values: tuple[float, float]) -> str:
    low, high = (f"{value:.2g}" for value in values)
    return low if low == high else f"{low}–{high}"
