"""Alternatives to an experiment's plan: other trust models, privacy units, correlations of noise.

A cell is a pair of a trust model and a privacy unit: the same experiment with `privacy.trust` and
`privacy.unit` changed. Its noise and ε come from the federation that `fedsim run` would use, so
they equal what a run would charge. Nothing is trained, and no data are read.

Each correlation of noise is planned at the same ε. Its error is that of the models after 1, 2, ...
rounds. A model is the sum of the releases of all rounds so far; with `fedavgm`, the server's
momentum is applied to the releases first.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedsim.accountant.trust import CLAIMED_AGAINST
from fedsim.clients.mechanisms.plan import Accounting, PrivacyPlan, PrivacyPlanError
from fedsim.clients.mechanisms.planner import calibrate_noise
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.core.errors import InputError
from fedsim.core.text_formats import json_value
from fedsim.experiment import Experiment, ExperimentError, LoadedExperiment, load_experiment
from fedsim.experiment.errors import path_text
from fedsim.federation.assembly import refuse_overspending, with_plans
from fedsim.federation.federation import Federation
from fedsim.noise.correlated.run import strategies_for
from fedsim.noise.correlated.settings import SCHEME
from fedsim.noise.correlated.strategies import INDEPENDENT
from fedsim.planning import NOTHING_TO_PLAN
from fedsim.server.participation.schedules import SeparatedSchedule
from fedsim.statement.sentence import OBSERVER_NAMES

OBSERVERS = tuple(OBSERVER_NAMES)
"""The observers, from the one who sees most. A claim against one covers all that follow it."""

CELLS = tuple(
    (trust, unit) for unit in ("example", "client") for trust in ("local", "distributed", "central")
)
_BOUNDS = {"example": "max_grad_norm", "client": "max_update_norm"}
_NOISE_BY = {"local": "client", "distributed": "share", "central": "server"}
_TIGHT = 0.999  # least share of its budget that a client with the strictest budget spends


@dataclass(frozen=True)
class CellClient:
    """The noise and ε of one client under one trust model and privacy unit."""

    client: int
    noise_multiplier: float  # of what the client, or the server for it, adds
    epsilon: Mapping[str, float]  # by observer, of those from whom the noise protects


@dataclass(frozen=True)
class PlannedCell:
    """The privacy plan of an experiment under one trust model and one privacy unit."""

    trust: str
    unit: str
    is_own: bool
    clients: tuple[CellClient, ...] = ()  # that train
    delta: float | None = None  # the largest of any client
    honest: int | None = None  # least clients that add a share of the noise to a secure sum
    strictest: tuple[int, ...] = ()  # clients that determine the noise of all; none in local trust
    reason: str | None = None  # why the experiment cannot run this way; None if it can

    def epsilon(self, observer: str) -> float | None:
        """Return the largest ε of any client against an observer; None if it is trusted."""
        values = [client.epsilon[observer] for client in self.clients if observer in client.epsilon]
        return max(values, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON value; an infinite ε is null. A trusted observer has no ε."""
        cell: dict[str, Any] = {"trust": self.trust, "unit": self.unit, "own": self.is_own}
        if self.reason is not None:
            return {**cell, "reason": self.reason}
        known = {name: self.epsilon(name) for name in OBSERVERS}
        facts = {
            "delta": self.delta,
            "noise_by": _NOISE_BY[self.trust],
            "honest": self.honest,
            "strictest": self.strictest,
            "epsilon": {name: epsilon for name, epsilon in known.items() if epsilon is not None},
            "clients": self.clients,
        }
        return {**cell, **json_value(facts)}


def privacy_of(experiment: Experiment) -> PrivacySettings:
    """Return the section `privacy` of an experiment; without it, raise a PrivacyPlanError."""
    if experiment.privacy is None:
        raise PrivacyPlanError(NOTHING_TO_PLAN)
    return experiment.privacy


def plan_cells(loaded: LoadedExperiment, federation: Federation) -> tuple[PlannedCell, ...]:
    """Return the plans of an experiment with privacy under every trust model and privacy unit.

    If the mechanism is proven for local trust only, the result has only the plan of the file.
    """
    privacy = privacy_of(loaded.experiment)
    own = privacy.trust.name, privacy.unit
    return tuple(
        _planned(federation, is_own=True) if cell == own else plan_cell(loaded, federation, *cell)
        for cell in ((own,) if privacy.release_kind.local_trust_only else CELLS)
    )


def plan_cell(
    loaded: LoadedExperiment,
    federation: Federation,
    trust: str,
    unit: str,
    *,
    also: Mapping[str, Any] | None = None,
) -> PlannedCell:
    """Return an experiment's privacy plan if its trust model and privacy unit were the given ones.

    If the experiment cannot run this way, the plan has the first error message as its `reason`.
    `also` has further settings to change, as `{"key.path": value}`.
    """
    changes = {**(also or {}), **_changes(privacy_of(loaded.experiment), trust, unit)}
    try:
        planned = changed_plans(loaded, federation, changes)
        refuse_overspending(planned)
    except (InputError, ValueError) as error:
        reason = str(error)
        if isinstance(error, ExperimentError):
            reason = f"{path_text(error.problems[0].path)}: {error.problems[0].message}"
        return PlannedCell(trust, unit, is_own=False, reason=reason)
    return _planned(planned, is_own=False)


def changed_plans(
    loaded: LoadedExperiment, federation: Federation, changes: Mapping[str, Any]
) -> Federation:
    """Return a federation with the plans of an experiment with changes `{"key.path": value}`.

    Raises ValueError if the changed experiment has mistakes, or no noise meets its settings.
    """
    content = loaded.experiment.model_dump(mode="json", exclude_unset=True)
    return with_plans(federation, load_experiment(content, changes, base=loaded.base))


def _changes(privacy: PrivacySettings, trust: str, unit: str) -> dict[str, Any]:
    """Return the overrides of a cell: trust, unit and clip norm of the unit.

    The clip norm of another unit has the value in the file: no noise and no ε depends on it.
    """
    changes: dict[str, Any] = {"privacy.trust.name": trust, "privacy.unit": unit}
    bound = privacy.max_grad_norm or privacy.max_update_norm
    if unit != privacy.unit and bound is not None:  # votes have no clip norm
        changes[f"privacy.{_BOUNDS[privacy.unit]}"] = None
        changes[f"privacy.{_BOUNDS[unit]}"] = bound
    return changes


def _planned(federation: Federation, *, is_own: bool) -> PlannedCell:
    plans, privacy = federation.plan.clients or (), privacy_of(federation.experiment)
    trust = privacy.trust.name
    clients = tuple(
        CellClient(number, plan.release.noise_multiplier, _epsilons(plan, privacy))
        for number, plan in enumerate(plans)
        if plan.planned_steps
    )
    parts = [plan.part for plan in plans if plan.part is not None]
    return PlannedCell(
        trust=trust,
        unit=privacy.unit,
        is_own=is_own,
        clients=clients,
        delta=max(plan.delta for plan in plans),
        honest=parts[0].honest if trust == "distributed" and parts else None,
        strictest=() if trust == "local" else _strictest(federation, clients),
    )


def _epsilons(plan: PrivacyPlan, privacy: PrivacySettings) -> dict[str, float]:
    """Return ε by observer, for each observer that the client's noise protects it from."""
    steps = plan.steps_to_take
    weaker = OBSERVERS[OBSERVERS.index(CLAIMED_AGAINST[privacy.trust.name]) :]
    epsilons: dict[str, float] = dict.fromkeys(weaker, planned_epsilon(plan, privacy, steps))
    against_server = plan.server_charges(0, steps)
    if against_server is not None:
        epsilons["server"] = Accounting.of(privacy, plan.delta).epsilon(against_server)
    return epsilons


def planned_epsilon(plan: PrivacyPlan, privacy: PrivacySettings, steps: int) -> float:
    """Return a client's ε after the first steps of its plan."""
    return Accounting.of(privacy, plan.delta).epsilon(plan.charges(0, steps))


def _strictest(federation: Federation, clients: tuple[CellClient, ...]) -> tuple[int, ...]:
    """Return the clients that have no more noise than their own settings ask for."""
    plans, terms = federation.plan.clients or (), federation.plan.client_privacy or ()
    used = {}  # the largest share that a client uses of its target ε, noise or fallback ε
    for client in clients:
        plan, privacy, shares = plans[client.client], terms[client.client].privacy, [0.0]
        if privacy.trust.fallback_epsilon is not None:
            shares.append(client.epsilon["server"] / privacy.trust.fallback_epsilon)
        if privacy.noise_multiplier is not None:
            shares.append(privacy.noise_multiplier / plan.noise_multiplier)
        elif privacy.target_epsilon is not None:
            shares.append(client.epsilon[OBSERVERS[-1]] / privacy.target_epsilon)
        used[client.client] = max(shares)
    most = max(used.values(), default=0.0)
    return tuple(client for client, share in used.items() if share >= _TIGHT * most)


@dataclass(frozen=True)
class PlannedCorrelation:
    """Noise of the models of a run, with one way to correlate it and to choose clients."""

    noise: str  # name and size of the correlation, such as "toeplitz, 50 bands", or "none"
    scheme: str  # of `federation.participation`, for which ε holds
    noise_multiplier: float  # of the fresh noise of a round
    error: float  # root mean square of a coordinate's noise over all models, in max_update_norm
    momentum: float = 0.0  # of the server's optimizer; with 0 a model is the sum of releases


def plan_correlations(federation: Federation) -> tuple[PlannedCorrelation, ...]:
    """Return the noise of the models for each kind of noise correlation, all at the same ε.

    The result is empty unless the experiment has `trust: central`, `max_update_norm` and a target ε
    or ρ. The ε is the smallest target ε of any client. For a target ρ, it is the smallest ε of the
    planned releases.
    """
    plans, privacy = federation.plan.clients or (), privacy_of(federation.experiment)
    if privacy.trust.name != "central" or privacy.max_update_norm is None:
        return ()
    targets = [plan.target_epsilon for plan in plans if plan.target_epsilon is not None]
    if privacy.accountant.target_rho is not None:
        trained = [plan for plan in plans if plan.planned_steps]
        targets = [planned_epsilon(plan, privacy, plan.planned_steps) for plan in trained]
    if not targets:
        return ()
    strictest = min(plans, key=lambda plan: plan.target_epsilon or math.inf)
    participation = federation.plan.participation
    return compare_correlations(
        rounds=participation.rounds,
        clients=participation.num_clients,
        clients_per_round=participation.clients_per_round,
        target_epsilon=min(targets),
        accounting=Accounting.of(privacy, strictest.delta),
        momentum=federation.experiment.federation.algorithm.momentum,
    )


def compare_correlations(
    *,
    rounds: int,
    clients: int,
    clients_per_round: int,
    target_epsilon: float,
    accounting: Accounting,
    momentum: float = 0.0,
) -> tuple[PlannedCorrelation, ...]:
    """Return the noise of models for each kind of correlation, all at the same ε.

    `clients_per_round` is expected or exact; `blt` is optimised for `momentum`, in [0, 1). It is a
    ValueError if no noise reaches the target.
    """
    turns = SeparatedSchedule(0, clients, clients_per_round).separation(rounds)
    noise_of = partial(calibrate_noise, target_epsilon=target_epsilon, accounting=accounting)
    drawn, always = PoissonSampling(min(1.0, clients_per_round / clients)), PoissonSampling(1.0)
    whole = noise_of(always, 1)
    correlated = strategies_for(turns, momentum)
    rows = (
        ("none", "poisson", noise_of(drawn, rounds), INDEPENDENT),
        ("none", SCHEME, noise_of(always, turns.max_rounds), INDEPENDENT),
        *((name, SCHEME, whole * each.sensitivity(turns), each) for name, each in correlated),
    )
    return tuple(
        PlannedCorrelation(name, scheme, z, z * each.prefix_error(rounds, momentum).rms, momentum)
        for name, scheme, z, each in rows
    )
