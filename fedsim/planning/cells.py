"""The cells of an experiment: every trust model and unit, planned as a run of it would be.

A cell is the experiment with `privacy.trust` and `privacy.unit` changed. Its noise and its ε are
those of the assembled federation, so they are what `fedsim run` would charge.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.trust import CLAIMED_AGAINST
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.sampling import Charges
from fedsim.core.errors import InputError
from fedsim.core.text_formats import finite_or_none
from fedsim.experiment import ExperimentError, LoadedExperiment, load_experiment
from fedsim.experiment.errors import path_text
from fedsim.federation.assembly import with_plans
from fedsim.federation.federation import Federation
from fedsim.federation.plan_checks import refuse_overspending
from fedsim.statement.observers import OBSERVER_NAMES

OBSERVERS = tuple(OBSERVER_NAMES)
"""Observers, those who see more first. A claim against one covers all after it."""

CELLS = tuple(
    (trust, unit) for unit in ("example", "client") for trust in ("local", "distributed", "central")
)
_BOUNDS = {"example": "max_grad_norm", "client": "max_update_norm"}
_TIGHT = 0.999  # share of a budget that the client with the strictest one spends


@dataclass(frozen=True)
class CellClient:
    """One client in one cell.

    Attributes:
        client: its number.
        noise_multiplier: noise that it adds, or that the server adds for it, in its own bound.
        epsilon: its ε against each observer that the cell protects it from; by observer.
    """

    client: int
    noise_multiplier: float
    epsilon: Mapping[str, float]


@dataclass(frozen=True)
class PlannedCell:
    """One trust model with one unit.

    Attributes:
        trust: local, distributed or central.
        unit: example or client.
        is_own: whether it is the cell of the file.
        clients: what each client gets; empty for a cell that the experiment cannot run in.
        delta: the largest δ of any client; None for a cell that it cannot run in.
        honest: shares of noise that every sum has at least; None but in distributed trust.
        strictest: the clients that ask for the most noise, which sets that of all; empty in local
            trust.
        reason: the first reason why the experiment cannot run in the cell; None if it can.
    """

    trust: str
    unit: str
    is_own: bool
    clients: tuple[CellClient, ...] = ()
    delta: float | None = None
    honest: int | None = None
    strictest: tuple[int, ...] = ()
    reason: str | None = None

    @property
    def noise_by(self) -> str:
        """Who adds the noise: each client all of it, each a share, or the server."""
        return {"local": "client", "distributed": "share", "central": "server"}[self.trust]

    @property
    def noise_range(self) -> tuple[float, float]:
        """The smallest and the largest noise multiplier of any client."""
        values = [one.noise_multiplier for one in self.clients]
        return min(values), max(values)

    def epsilon(self, observer: str) -> float | None:
        """Return the largest ε of any client; None where the observer is trusted."""
        values = [one.epsilon[observer] for one in self.clients if observer in one.epsilon]
        return max(values, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the cell as a JSON value: infinite ε as null, without trusted observers."""
        found: dict[str, Any] = {"trust": self.trust, "unit": self.unit, "own": self.is_own}
        if self.reason is not None:
            return {**found, "reason": self.reason}
        known = {name: self.epsilon(name) for name in OBSERVERS}
        return {
            **found,
            "delta": self.delta,
            "noise_by": self.noise_by,
            "honest": self.honest,
            "strictest": list(self.strictest),
            "epsilon": {n: finite_or_none(e) for n, e in known.items() if e is not None},
            "clients": [
                {
                    "client": one.client,
                    "noise_multiplier": one.noise_multiplier,
                    "epsilon": {name: finite_or_none(e) for name, e in one.epsilon.items()},
                }
                for one in self.clients
            ],
        }


def plan_cells(loaded: LoadedExperiment, federation: Federation) -> tuple[PlannedCell, ...]:
    """Return every cell of an experiment, without training.

    Args:
        loaded: the experiment, with privacy.
        federation: its assembled federation.
    """
    privacy = loaded.experiment.privacy
    if privacy is None:
        return ()
    if privacy.release_kind.local_trust_only:  # it has a proof in its own cell alone
        return (_planned(federation, is_own=True),)
    return tuple(
        _planned(federation, is_own=True)
        if (trust, unit) == (privacy.trust.name, privacy.unit)
        else plan_cell(loaded, federation, trust, unit)
        for trust, unit in CELLS
    )


def plan_cell(
    loaded: LoadedExperiment,
    federation: Federation,
    trust: str,
    unit: str,
    *,
    also: Mapping[str, Any] | None = None,
) -> PlannedCell:
    """Return a cell that the file does not name; the first refusal is its reason.

    Args:
        loaded: the experiment, with privacy.
        federation: its assembled federation.
        trust: local, distributed or central.
        unit: example or client.
        also: other settings to change, `{"key.path": value}`.
    """
    experiment = loaded.experiment
    content = experiment.model_dump(mode="json", exclude_unset=True)
    changes = {} if experiment.privacy is None else _changes(experiment.privacy, trust, unit)
    try:
        changes = {**(also or {}), **changes}
        cell = load_experiment(content, changes, base=loaded.base)
        planned = with_plans(federation, cell)
        refuse_overspending(planned)
    except ExperimentError as error:
        first = error.problems[0]
        reason = f"{path_text(first.path)}: {first.message}"
        return PlannedCell(trust, unit, is_own=False, reason=reason)
    except (InputError, ValueError) as error:
        return PlannedCell(trust, unit, is_own=False, reason=str(error))
    return _planned(planned, is_own=False)


def _changes(privacy: PrivacySettings, trust: str, unit: str) -> dict[str, Any]:
    """Return the overrides of a cell: trust, unit and the bound of the unit.

    The bound of another unit has the length of the file's: no noise multiplier and no ε depends on
    it.
    """
    changes: dict[str, Any] = {"privacy.trust.name": trust, "privacy.unit": unit}
    bound = privacy.max_grad_norm or privacy.max_update_norm
    if unit != privacy.unit and bound is not None:  # votes have none
        changes[f"privacy.{_BOUNDS[privacy.unit]}"] = None
        changes[f"privacy.{_BOUNDS[unit]}"] = bound
    return changes


def _planned(federation: Federation, *, is_own: bool) -> PlannedCell:
    plans, terms = list(federation.plan.clients or ()), list(federation.plan.client_privacy or ())
    trust, unit = terms[0].privacy.trust.name, terms[0].privacy.unit
    clients = tuple(
        CellClient(number, plan.release.noise_multiplier, _epsilons(plan, own.privacy))
        for number, (plan, own) in enumerate(zip(plans, terms, strict=True))
        if plan.planned_steps
    )
    parts = [plan.part for plan in plans if plan.part is not None]
    return PlannedCell(
        trust=trust,
        unit=unit,
        is_own=is_own,
        clients=clients,
        delta=max(plan.delta for plan in plans),
        honest=parts[0].honest if trust == "distributed" and parts else None,
        strictest=() if trust == "local" else _strictest(federation, clients),
    )


def _epsilons(plan: PrivacyPlan, privacy: PrivacySettings) -> dict[str, float]:
    """Return ε against each observer that the client's noise protects it from."""
    steps = plan.steps_to_take
    claimed = planned_epsilon(plan, privacy, plan.charges(0, steps))
    place = OBSERVERS.index(CLAIMED_AGAINST[privacy.trust.name])
    found: dict[str, float] = dict.fromkeys(OBSERVERS[place:], claimed)
    against_server = plan.server_charges(0, steps)
    if against_server is not None:
        found["server"] = planned_epsilon(plan, privacy, against_server)
    return found


def planned_epsilon(plan: PrivacyPlan, privacy: PrivacySettings, charges: Charges) -> float:
    """Return ε of planned charges with the sampler's slack.

    Args:
        plan: of the client.
        privacy: its settings.
        charges: of its plan, in one view.
    """
    return _epsilon(tuple(charges), plan.delta, privacy.accounting, privacy.adjacency.name)


@lru_cache(maxsize=4096)  # clients of one size and budget share the answer
def _epsilon(charges: Any, delta: float, accountant: Any, adjacency: Any) -> float:
    if not any(count for _, count in charges):
        return 0.0
    ledger = PrivacyLedger()
    for event, count in charges:
        ledger.record(event, count)
    return ledger.epsilon_with_slack(delta, accountant, adjacency)


def _strictest(federation: Federation, clients: tuple[CellClient, ...]) -> tuple[int, ...]:
    """Return the clients that have no more noise than their own settings ask for."""
    plans, terms = federation.plan.clients or (), federation.plan.client_privacy or ()
    use = {one.client: _use(plans[one.client], terms[one.client].privacy, one) for one in clients}
    most = max(use.values(), default=0.0)
    return tuple(client for client, share in use.items() if share >= _TIGHT * most)


def _use(plan: PrivacyPlan, privacy: PrivacySettings, one: CellClient) -> float:
    """Return the share that a client uses of its claim, or of its limit against the server."""
    uses = [0.0]
    limit = privacy.trust.fallback_epsilon
    if limit is not None:
        uses.append(one.epsilon["server"] / limit)
    if privacy.noise_multiplier is not None:
        uses.append(privacy.noise_multiplier / plan.noise_multiplier)
    elif privacy.target_epsilon is not None:
        uses.append(one.epsilon[OBSERVERS[-1]] / privacy.target_epsilon)
    return max(uses)
