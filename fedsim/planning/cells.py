"""The privacy plan of an experiment under every trust model and privacy unit.

A cell is a pair of a trust model and a privacy unit. Its plan is that of the same experiment with
`privacy.trust` and `privacy.unit` changed to this pair. Noise and ε come from the federation that
`fedsim run` would use, so they equal what a run would charge.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsim.accountant.trust import CLAIMED_AGAINST
from fedsim.clients.mechanisms.accounting import Accounting
from fedsim.clients.mechanisms.plan import PrivacyPlan, PrivacyPlanError
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.errors import InputError
from fedsim.core.text_formats import finite_or_none
from fedsim.experiment import Experiment, ExperimentError, LoadedExperiment, load_experiment
from fedsim.experiment.errors import path_text
from fedsim.federation.assembly import with_plans
from fedsim.federation.federation import Federation
from fedsim.federation.plan_checks import refuse_overspending
from fedsim.planning import NOTHING_TO_PLAN
from fedsim.statement.observers import OBSERVER_NAMES

OBSERVERS = tuple(OBSERVER_NAMES)
"""The observers, from the one who sees most. A claim against one covers all that follow it."""

CELLS = tuple(
    (trust, unit) for unit in ("example", "client") for trust in ("local", "distributed", "central")
)
_BOUNDS = {"example": "max_grad_norm", "client": "max_update_norm"}
_TIGHT = 0.999  # least share of its budget that a client with the strictest budget spends


@dataclass(frozen=True)
class CellClient:
    """The noise and ε of one client under one trust model and privacy unit.

    Attributes:
        client: number of the client.
        noise_multiplier: noise that the client adds, or that the server adds for it, divided by the
            client's clip norm.
        epsilon: the client's ε against each observer from which the noise protects it.
    """

    client: int
    noise_multiplier: float
    epsilon: Mapping[str, float]


@dataclass(frozen=True)
class PlannedCell:
    """The privacy plan of an experiment under one trust model and one privacy unit.

    Attributes:
        trust: the trust model: local, distributed or central.
        unit: the privacy unit: example or client.
        is_own: whether the experiment file has this trust model and unit.
        clients: noise and ε of each client that trains; empty if the experiment cannot run this
            way.
        delta: largest δ of any client; None if the experiment cannot run this way.
        honest: smallest number of honest clients in a secure sum, each of which adds a share of the
            noise; None if the trust model is not distributed.
        strictest: numbers of the clients whose privacy settings require the most noise, and so
            determine the noise of all clients. Empty in local trust, where noise is set per client.
        reason: first reason why the experiment cannot run this way; None if it can.
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
        """Who adds the noise: "client", "server", or "share" if each client adds a share of it."""
        return {"local": "client", "distributed": "share", "central": "server"}[self.trust]

    @property
    def noise_range(self) -> tuple[float, float]:
        """Smallest and largest noise multiplier of any client."""
        values = [client.noise_multiplier for client in self.clients]
        return min(values), max(values)

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
        return {
            **cell,
            "delta": self.delta,
            "noise_by": self.noise_by,
            "honest": self.honest,
            "strictest": list(self.strictest),
            "epsilon": {n: finite_or_none(e) for n, e in known.items() if e is not None},
            "clients": [
                {
                    **vars(client),
                    "epsilon": {name: finite_or_none(e) for name, e in client.epsilon.items()},
                }
                for client in self.clients
            ],
        }


def privacy_of(experiment: Experiment) -> PrivacySettings:
    """Return the section `privacy` of an experiment.

    Raises:
        PrivacyPlanError: the experiment has no such section.
    """
    if experiment.privacy is None:
        raise PrivacyPlanError(NOTHING_TO_PLAN)
    return experiment.privacy


def plan_cells(loaded: LoadedExperiment, federation: Federation) -> tuple[PlannedCell, ...]:
    """Return the plans of an experiment under every trust model and privacy unit, without training.

    If the mechanism is proven for local trust only, the result has only the plan with the trust
    model and the unit of the file.

    Args:
        loaded: the experiment, which has privacy.
        federation: the experiment's assembled federation.
    """
    privacy = privacy_of(loaded.experiment)
    own = privacy.trust.name, privacy.unit
    return tuple(
        _planned(federation, is_own=True)
        if (trust, unit) == own
        else plan_cell(loaded, federation, trust, unit)
        for trust, unit in ((own,) if privacy.release_kind.local_trust_only else CELLS)
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

    Args:
        loaded: the experiment.
        federation: the experiment's assembled federation.
        trust: the trust model: local, distributed or central.
        unit: the privacy unit: example or client.
        also: further settings to change, as `{"key.path": value}`; None for no others.
    """
    content = loaded.experiment.model_dump(mode="json", exclude_unset=True)
    changes = {**(also or {}), **_changes(privacy_of(loaded.experiment), trust, unit)}
    try:
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
    """Return the overrides of a cell: trust, unit and clip norm of the unit.

    The clip norm of another unit has the value in the file: no noise multiplier and no ε depends
    on it.
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
    accounting = Accounting.of(privacy, plan.delta)
    claimed = accounting.epsilon(plan.charges(0, steps))
    place = OBSERVERS.index(CLAIMED_AGAINST[privacy.trust.name])
    epsilons: dict[str, float] = dict.fromkeys(OBSERVERS[place:], claimed)
    against_server = plan.server_charges(0, steps)
    if against_server is not None:
        epsilons["server"] = accounting.epsilon(against_server)
    return epsilons


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
