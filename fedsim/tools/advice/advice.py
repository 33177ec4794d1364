"""The advice about an experiment: candidates in the order of their predicted error, and notes."""

from dataclasses import dataclass
from typing import Any

from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION
from fedsim.clients.mechanisms.plan import PrivacyBudgetError, PrivacyPlanError
from fedsim.core.commands import Phases
from fedsim.core.text_formats import finite_or_none
from fedsim.experiment import LoadedExperiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.plan_checks import refuse_overspending
from fedsim.tools.advice.facts import PublicFacts, public_facts
from fedsim.tools.advice.noise_model import plausible_tasks
from fedsim.tools.advice.notes import notes_of, yaml_lines
from fedsim.tools.advice.ranking import PROPOSAL, Ranked, Ranking

_CLEAR_GAIN = 0.95  # of the file's predicted error


@dataclass(frozen=True)
class Advice:
    """Candidates of an experiment, compared by public facts.

    Attributes:
        facts: what the comparison depends on.
        rows: the file, the proposal where there is one, and other candidates.
        compared: number of candidates.
        notes: sentences about what the candidates leave open.
        refusal: the reason why `fedsim run` refuses the file; None if it does not.
    """

    facts: PublicFacts
    rows: tuple[Ranked, ...]
    compared: int
    notes: tuple[str, ...]
    refusal: str | None = None

    @property
    def proposal(self) -> Ranked | None:
        """The proposed candidate; None where none is clearly better than the file.

        Correlated noise is proposed only where it is clearly better than all else.
        """
        found = [row for row in self.rows if row.name == PROPOSAL]
        correlated = [row for row in self.rows if row.candidate.correlation is not None]
        least = min((row.error for row in found), default=self.rows[0].error)
        found = [row for row in correlated if row.error < _CLEAR_GAIN * least] or found
        return found[0] if found and found[0].ratio < _CLEAR_GAIN else None

    @property
    def lines(self) -> str:
        """The proposal as YAML lines; empty without one."""
        return "" if self.proposal is None else yaml_lines(self.proposal.changes)

    def to_json(self) -> dict[str, Any]:
        """Return the advice as a JSON value; infinite numbers are null."""
        facts = self.facts
        return {
            "facts": {
                "clients": facts.num_clients,
                "examples": [int(n) for n in facts.examples],
                "epsilon": [finite_or_none(float(e)) for e in facts.epsilons],
                "trained_values": facts.trained_values,
                "inputs": facts.inputs,
                "outputs": facts.outputs,
                "label_skew": facts.label_skew,
            },
            "compared": self.compared,
            "tasks": len(plausible_tasks()),
            "candidates": [_row_to_json(row) for row in self.rows],
            "proposal": None if self.proposal is None else dict(self.proposal.changes),
            "yaml": self.lines,
            "notes": list(self.notes),
            "refusal": self.refusal,
        }


def _row_to_json(row: Ranked) -> dict[str, Any]:
    candidate = row.candidate
    return {
        "name": row.name,
        "changes": dict(row.changes),
        "rounds": candidate.rounds,
        "steps": candidate.steps,
        "learning_rate": candidate.learning_rate,
        "weighting": candidate.weighting,
        "sampling_rate": list(row.rates),
        "noise_multiplier": [finite_or_none(z) for z in row.noise],
        "noise_is_exact": row.exact,
        "noise_to_signal": finite_or_none(row.error),
        "ratio": finite_or_none(row.ratio),
        "ratio_range": [finite_or_none(value) for value in row.ratio_range],
    }


def advise_experiment(loaded: LoadedExperiment, *, phases: Phases | None = None) -> Advice:
    """Return advice about an experiment, without training and without reading an example.

    Data are loaded, because the partition sets the clients' numbers of examples. Nothing else about
    them enters.

    Args:
        loaded: the experiment.
        phases: the phases of the caller.

    Raises:
        PrivacyPlanError: the experiment has no `privacy` section, or no noise meets its target.
        ValueError: the experiment cannot be assembled (see `assemble`).
    """
    privacy = loaded.experiment.privacy
    if privacy is None:
        raise PrivacyPlanError("there is nothing to plan: the experiment has no privacy section")
    if privacy.mechanism.name != GRADIENT_PERTURBATION:
        raise PrivacyPlanError(
            "the advice compares schedules of noise on gradients, and privacy.mechanism is "
            f"{privacy.mechanism.name}; call it with a file of mechanism: {GRADIENT_PERTURBATION}"
        )
    groups = privacy.clipping.groups
    fixed = [name for name, one in groups.items() if one.noise_multiplier is not None]
    if fixed:
        raise PrivacyPlanError(
            f"privacy.clipping.groups gives {fixed[0]!r} a noise_multiplier, and advice compares "
            "schedules whose noise is calibrated to one ε; give the group a relative_noise instead"
        )
    if loaded.experiment.local.lr_schedule is not None:
        raise PrivacyPlanError(
            "the advice compares constant learning rates, and local.lr_schedule changes them; call "
            "it with local.lr_schedule=null"
        )
    if (privacy.trust.name, privacy.unit) != ("local", "example"):
        raise PrivacyPlanError(
            "the advice compares schedules of trust local with unit example, got "
            f"{privacy.trust.name} with unit {privacy.unit}; call it with privacy.trust=local and "
            "privacy.unit=example, and fedsim plan without --advise for this trust model"
        )
    if loaded.experiment.federation.partial_work is not None:
        raise PrivacyPlanError(
            "the advice compares whole rounds, and with partial_work some clients take fewer "
            "steps; set federation.partial_work=null for the advice"
        )
    scheme = loaded.experiment.federation.participation.scheme
    if scheme in ("trace", "buffered"):
        raise PrivacyPlanError(
            "the advice compares numbers of rounds in which all clients take part equally often, "
            f"got participation {scheme}; use scheme: uniform for the advice, and fedsim plan "
            "without --advise for this scheme"
        )
    if why := loaded.experiment.local.gradient_facts.not_advised:
        raise PrivacyPlanError(why)
    phases = phases or Phases()
    federation = assemble(loaded, ledger=None, phases=phases)
    phases.begin("comparing schedules")
    facts = public_facts(federation)
    ranking = Ranking(federation, facts)
    rows = tuple(ranking.ranked())
    advice = Advice(
        facts=facts,
        rows=rows,
        compared=len(ranking.candidates),
        notes=tuple(notes_of(federation, ranking, rows)),
        refusal=_refusal(federation),
    )
    phases.end()
    return advice


def _refusal(federation: Federation) -> str | None:
    try:
        refuse_overspending(federation)
    except PrivacyBudgetError as error:
        return str(error)
    return None
