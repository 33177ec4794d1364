"""Planned noise and ε of each client, and curves of ε by several bounds, without training."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import Any

from fedsim.accountant import zcdp_rho
from fedsim.accountant.search import largest_count
from fedsim.accountant.textbook.bounds import choose_bounds
from fedsim.clients.mechanisms.plan import PrivacyBudgetError
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.commands import Phases
from fedsim.core.errors import InputError
from fedsim.core.text_formats import json_value
from fedsim.experiment import Experiment, LoadedExperiment
from fedsim.federation.assembly import (
    assemble,
    full_batch_note,
    last_round,
    privacy_warnings,
    refuse_overspending,
)
from fedsim.federation.federation import Federation
from fedsim.planning.alternatives import (
    PlannedCell,
    PlannedCorrelation,
    changed_plans,
    plan_cells,
    plan_correlations,
    planned_epsilon,
    privacy_of,
)
from fedsim.planning.bounds import BoundCurve, CurveSchedule, bound_curve, even_numbers

_MAX_CURVE_POINTS = 12  # points of each client's curve
_MAX_PLANNED_RUNS = 100  # a budget that affords this many runs counts as unlimited
_FACTORS = ((0.5, "half"), (2, "double"))  # of the batch and of the rounds


def experiment_curves(
    loaded: LoadedExperiment, names: Sequence[str], *, points: int, phases: Phases
) -> tuple[BoundCurve, ...]:
    """Return curves of ε over the steps, one for each kind of clients; raises as `plan_experiment`.

    The points are evenly spaced in the logarithm of the steps; a single one is after all steps.
    """
    bounds = choose_bounds(names, orders=privacy_of(loaded.experiment).accountant.orders)
    federation = assemble(loaded, ledger=None, phases=phases)
    phases.begin("bounding ε")
    return tuple(
        bound_curve(kind, bounds, even_numbers(1, kind.steps, points) if points > 1 else None)
        for kind in client_kinds(federation)
    )


def client_kinds(federation: Federation) -> Iterator[CurveSchedule]:
    """Yield one schedule of steps for each kind of clients.

    Clients of a kind have equal sampling rate, noise multiplier, δ and number of steps. The noise
    is that of its client with the smallest effective noise multiplier.
    """
    plans = federation.plan.clients or ()
    members: dict[tuple[object, ...], list[int]] = {}
    for client, plan in enumerate(plans):
        if plan.steps_to_take:
            numbers = (plan.release.sampling_rate, plan.noise_multiplier, plan.delta)
            key = (plan.steps_to_take, *(f"{number:.6g}" for number in numbers))
            members.setdefault(key, []).append(client)
    adjacency = privacy_of(federation.experiment).adjacency.name
    for clients in members.values():
        least = min(clients, key=lambda member: plans[member].release.effective_noise_multiplier)
        plan = plans[least]
        yield CurveSchedule(
            clients=tuple(clients),
            sampling_rate=plan.release.sampling_rate,
            noise_multiplier=plan.noise_multiplier,
            delta=plan.delta,
            adjacency=adjacency,
            steps=plan.steps_to_take,
            charges=lambda count, plan=plan: tuple(plan.charges(0, count)),
        )


@dataclass(frozen=True)
class PlannedClient:
    """The privacy budget that one client is projected to spend."""

    client: int
    examples: int  # 0 if the number is private
    sampling_rate: float
    noise_multiplier: float
    rounds: int  # for which the client is scheduled
    delta: float
    target_epsilon: float | None
    steps: int  # lower than planned if more would exceed the budget
    affordable_rounds: int | None  # whole rounds; None without a limit
    last_round: int  # in which the client takes a step; 0 if it takes none
    epsilon: float  # after all steps
    group: str | None = None  # of `privacy.clients`
    name: str | None = None
    curve: tuple[tuple[int, float], ...] = ()  # (number of rounds, ε), ascending


@dataclass(frozen=True)
class Variation:
    """Projected privacy spend of the median client with one setting of the experiment changed."""

    change: str
    noise_multiplier: float
    steps: int
    epsilon: float


@dataclass(frozen=True)
class Plan:
    """The privacy plan of a federation: projected noise and ε of all clients."""

    delta: float  # the largest of any client
    target_epsilon: float | None
    system_epsilon: float  # largest planned ε of any client
    rho: float | None  # largest ρ of zCDP of any client, if the noise is calibrated to a ρ
    clients: tuple[PlannedClient, ...]
    median_client: int  # by number of examples, of the clients that take a step if any does
    refusal: str | None  # why `fedsim run` refuses the plan
    note: str | None  # that the batch size is too large for the smallest clients
    warnings: tuple[str, ...]
    cells: tuple[PlannedCell, ...]
    correlations: tuple[PlannedCorrelation, ...]
    bounds: tuple[BoundCurve, ...] | None
    variations: tuple[Variation, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON value; an infinite ε is null."""
        content = {
            **vars(self),
            "clients": [_known(vars(client), "name") for client in self.clients],
            "cells": [cell.to_json() for cell in self.cells],
            "correlations": self.correlations or None,
            "bounds": None if self.bounds is None else [curve.to_json() for curve in self.bounds],
        }
        return json_value(_known(content, "rho", "correlations", "bounds"))


def _known(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return content without those of the named keys that are None."""
    return {key: x for key, x in content.items() if key not in names or x is not None}


def plan_experiment(
    loaded: LoadedExperiment,
    *,
    curves: bool = True,
    bounds: Sequence[str] | None = None,
    phases: Phases | None = None,
) -> Plan:
    """Return the privacy plan of an experiment, without training.

    The data are loaded, because the clients' numbers of examples set their sampling rates.

    Raises:
        PrivacyPlanError: the experiment has no `privacy` section, or no noise meets its target.
        ValueError: there is no such bound, or the experiment cannot be assembled (see `assemble`).
    """
    privacy = privacy_of(loaded.experiment)
    further = None if bounds is None else choose_bounds(bounds, orders=privacy.accountant.orders)
    phases = phases or Phases()
    federation = assemble(loaded, ledger=None, phases=phases)
    phases.begin("projecting ε")
    rounds = enumerate(federation.plan.participation.planned_rounds())
    clients = tuple(_plan_client(federation, *planned, curve=curves) for planned in rounds)
    trained = [client for client in clients if client.steps] or clients
    middle = median_low(client.examples for client in trained)
    median = next(client for client in trained if client.examples == middle)
    rho, adjacency = None, privacy.adjacency.name
    if privacy.accountant.target_rho is not None:
        plans = federation.plan.clients or ()
        rho = max(zcdp_rho(plan.charges(0, plan.steps_to_take), adjacency) for plan in plans)
    plan = Plan(
        delta=max(client.delta for client in clients),
        target_epsilon=privacy.target_epsilon,
        system_epsilon=max(client.epsilon for client in clients),
        rho=rho,
        clients=clients,
        median_client=median.client,
        refusal=budget_refusal(federation),
        note=full_batch_note(loaded.experiment, federation.data.clients.sizes),
        warnings=tuple(privacy_warnings(federation)),
        cells=plan_cells(loaded, federation),
        correlations=plan_correlations(federation),
        bounds=None
        if further is None
        else tuple(bound_curve(kind, further) for kind in client_kinds(federation)),
        variations=tuple(_variations(loaded, federation, median)),
    )
    phases.end()
    return plan


def budget_refusal(federation: Federation) -> str | None:
    """Return the reason why privacy budgets forbid to run a federation; None if they allow it."""
    try:
        refuse_overspending(federation)
    except PrivacyBudgetError as error:
        return str(error)
    return None


def _plan_client(federation: Federation, client: int, rounds: int, *, curve: bool) -> PlannedClient:
    plan = (federation.plan.clients or ())[client]
    privacy = privacy_of(federation.experiment)
    parts = range(1, _MAX_CURVE_POINTS + 1) if curve else (_MAX_CURVE_POINTS,)
    marks = sorted({max(1, round(rounds * k / _MAX_CURVE_POINTS)) for k in parts})
    steps_after = partial(federation.plan.steps.steps_after, client)
    steps = {mark: min(steps_after(mark), plan.steps_to_take) for mark in marks if mark <= rounds}
    points = tuple((mark, planned_epsilon(plan, privacy, taken)) for mark, taken in steps.items())
    return PlannedClient(
        client=client,
        examples=plan.examples,
        sampling_rate=plan.release.sampling_rate,
        noise_multiplier=plan.noise_multiplier,
        rounds=rounds,
        delta=plan.delta,
        target_epsilon=plan.target_epsilon,
        steps=plan.steps_to_take,
        affordable_rounds=_affordable_rounds(federation, client, privacy),
        last_round=last_round(federation, client),
        epsilon=points[-1][1] if points else 0.0,
        curve=points,
        group=(federation.plan.client_privacy or ())[client].group,
        name=None if (names := federation.data.client_names) is None else names[client],
    )


def _affordable_rounds(federation: Federation, client: int, privacy: PrivacySettings) -> int | None:
    plan = (federation.plan.clients or ())[client]
    steps_after = partial(federation.plan.steps.steps_after, client)
    if plan.target_epsilon is None:
        return None
    taken = federation.plan.steps.whole_rounds_in(client, plan.steps_to_take)
    if plan.release.correlation is not None:  # a run is charged whole: for these rounds only
        return taken
    if taken and planned_epsilon(plan, privacy, steps_after(taken + 1)) > plan.target_epsilon:
        return taken  # calibrated noise affords no further round, unless there are thousands
    planned = federation.plan.steps.whole_rounds_in(client, plan.planned_steps)
    most = _MAX_PLANNED_RUNS * max(planned, 1)

    def epsilon(count: int) -> float:
        return planned_epsilon(plan, privacy, steps_after(count)) if count <= most else math.inf

    affordable = largest_count(epsilon, plan.target_epsilon, start=max(1, taken))
    return affordable if affordable < most else None


def _variations(
    loaded: LoadedExperiment, federation: Federation, client: PlannedClient
) -> Iterator[Variation]:
    """Yield projections of a client, each with one setting of the experiment changed."""
    yield Variation("as planned", client.noise_multiplier, client.steps, client.epsilon)
    for change, overrides in _changes(federation.experiment, client.examples):
        try:
            planned = changed_plans(loaded, federation, overrides)
        except (InputError, ValueError):
            continue  # it could not run, so there is nothing to compare
        plan = (planned.plan.clients or ())[client.client]
        epsilon = planned_epsilon(plan, privacy_of(planned.experiment), plan.steps_to_take)
        yield Variation(change, plan.noise_multiplier, plan.steps_to_take, epsilon)


def _changes(experiment: Experiment, examples: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a change in words, and the overrides that make it."""
    privacy = privacy_of(experiment)
    draws_batches = privacy.release_kind.draws_batches
    rate_key, batch_key = "privacy.sampling.rate", "local.batch_size"
    for factor, name in _FACTORS if draws_batches else ():
        if privacy.sampling.rate is not None:
            rate = min(1.0, privacy.sampling.rate * factor)
            yield f"{name} the batch: {rate_key}={rate:g}", {rate_key: rate}
        elif experiment.local.batch_size != "full":
            batch = max(1, round(experiment.local.batch_size * factor))
            yield f"{name} the batch: {batch_key}={batch}", {batch_key: batch}
        elif factor < 1:
            batch = max(1, round(examples * factor))
            change = f"{name} the batch: a number for {batch_key}, sampling.rate={factor:g}"
            yield change, {rate_key: factor, batch_key: batch}
    if privacy.accountant.orders is not None:
        key = "privacy.accountant.orders"
        yield f"the accountant's orders: {key}=null", {key: None}
    for factor, name in _FACTORS:
        rounds = max(1, round(experiment.federation.rounds * factor))
        yield f"{name} the rounds", {"federation.rounds": rounds}
    if draws_batches and privacy.trust.name == "local":  # one sampling elsewhere
        key = "privacy.sampling" if privacy.sampling.rate is None else "privacy.sampling.name"
        for sampling in sorted(SAMPLING_SCHEMES):
            if sampling != privacy.sampling.name and not SAMPLING_SCHEMES[sampling].is_cyclic:
                yield f"{key}={sampling}", {key: sampling}
