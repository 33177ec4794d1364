"""Planner of a client's privacy: calibrates its noise, and counts the steps that fit its budget.

The schedule of a client (its mechanism, sampling and rounds) is fixed before the run and depends on
nothing private. So the decisions of the client's privacy filter are known beforehand: the filter
grants the first `affordable_steps` steps and refuses all later ones.
"""

import math
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

from fedsim.accountant import calibrate_noise_multiplier, zcdp_rho
from fedsim.accountant.events import Adjacency
from fedsim.accountant.sampler_slack import target_without_slack
from fedsim.accountant.search import LEAST_NOISE, MOST_NOISE, largest_count, least_noise
from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.mechanisms.contract import Mechanism
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.kinds import ReleaseKind
from fedsim.clients.mechanisms.plan import (
    Accounting,
    Draft,
    PlanRequest,
    PrivacyBudgetError,
    PrivacyPlan,
    PrivacyPlanError,
    delta_of,
)
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.divided_batches import CyclicPoisson
from fedsim.clients.sampling.sampling import PoissonSampling, Sampling


@lru_cache(maxsize=4096)  # clients of one size and budget share the answer
def affordable_steps(
    step: Mechanism,
    most: int,
    *,
    target_epsilon: float,
    accounting: Accounting,
    noise_factor: float = 1.0,
) -> int:
    """Return the number of steps that fit into a target ε, at most `most`.

    Guarantee: that many steps have ε ≤ `target_epsilon` by the accounting. If the result is below
    `most`, one more step exceeds the target.

    Args:
        step: the mechanism of each step.
        most: upper limit of the result, ≥ 0.
        target_epsilon: ε of the budget, > 0.
        accounting: the accounting of the target.
        noise_factor: standard deviation of the noise that hides a step, over that of the step.
    """

    def epsilon(steps: int) -> float:
        return accounting.epsilon(step.charges(0, min(steps, most), noise_factor=noise_factor))

    if most == 0 or epsilon(most) <= target_epsilon:
        return most
    return largest_count(epsilon, target_epsilon, start=max(1, most // 2))


@lru_cache(maxsize=4096)  # clients of one size share a plan
def calibrate_noise(
    sampling: Sampling,
    steps: int,
    *,
    target_epsilon: float,
    accounting: Accounting,
    interpolate: bool = False,
) -> float:
    """Return the least noise multiplier with which the given steps spend at most the target ε.

    Guarantee: ε of the steps is at most `target_epsilon` by the accounting, even for sampled noise
    that is not exactly Gaussian.

    Args:
        sampling: how batches are drawn.
        steps: number of all planned steps, ≥ 1.
        target_epsilon: ε of the budget, > 0.
        accounting: the accounting of the target.
        interpolate: whether the search interpolates, in fewer steps than bisection; ignored under
            Poisson and cyclic Poisson sampling.

    Raises:
        ValueError: no noise multiplier meets the target.
    """
    if isinstance(sampling, PoissonSampling | CyclicPoisson):
        inner_epsilon, inner_delta = target_without_slack(target_epsilon, accounting.delta)
        return calibrate_noise_multiplier(
            target_epsilon=inner_epsilon,
            delta=inner_delta,
            sampling_rate=sampling.rate,
            steps=sampling.num_events(steps),
            accountant=accounting.accountant,
            adjacency=accounting.adjacency,
        )

    def epsilon(noise: float) -> float:
        step = DpSgdMechanism(sampling, FlatClipping(1.0), noise, 1.0)
        return accounting.epsilon(step.charges(0, steps))

    return least_noise(epsilon, target_epsilon, interpolate=interpolate)


def noise_of_release(
    release: Mechanism, steps: int, *, target_epsilon: float, accounting: Accounting
) -> float:
    """Return the least noise multiplier with which the planned releases spend at most the target ε.

    Args:
        release: the mechanism, with any noise multiplier.
        steps: number of all planned releases, ≥ 1.
        target_epsilon: ε of the budget, > 0.
        accounting: the accounting of the target.

    Raises:
        ValueError: no noise multiplier meets the target.
    """
    sampling, count, factor = release.equivalent(steps)
    equivalent_noise = calibrate_noise(
        sampling, count, target_epsilon=target_epsilon, accounting=accounting
    )
    if factor == 1.0:
        return equivalent_noise

    def epsilon(noise: float) -> float:
        return accounting.epsilon(release.with_effective_noise(noise).charges(0, steps))

    noise = equivalent_noise * factor * (1.0 + 2.0**-40)  # more than a product rounds
    return noise if epsilon(noise) <= target_epsilon else least_noise(epsilon, target_epsilon)


def noise_of_rho(
    release: Mechanism, steps: int, *, target_rho: float, adjacency: Adjacency
) -> float:
    """Return the least noise multiplier with which the planned releases are ρ-zCDP.

    ρ is proportional to 1 / (noise multiplier)², so the result needs no search.

    Args:
        release: the mechanism, with any noise multiplier.
        steps: number of all planned releases, ≥ 1.
        target_rho: ρ of the target, > 0; the small cost of inexact noise samplers is not counted.
        adjacency: which data sets are neighbours.

    Raises:
        ValueError: no ρ is known for the releases, or no noise multiplier meets the target.
    """
    charges = release.with_effective_noise(1.0).charges(0, steps)
    rho = zcdp_rho(charges, adjacency)
    if rho == math.inf:
        kinds = " and ".join(sorted({type(event).__name__ for event, _ in charges}))
        raise ValueError(
            f"sampling lowers ε and no ρ, and the releases are {kinds}; use target_epsilon, or "
            "releases without sampling (batch_size: full, or unit: client without secret draws)"
        )
    noise = math.sqrt(rho / target_rho) * (1.0 + 2.0**-40)  # more than a root and a square round
    if not LEAST_NOISE <= noise <= MOST_NOISE:
        raise ValueError(
            f"{target_rho:g} needs a noise multiplier of {noise:.3g}, and {LEAST_NOISE:g} to "
            f"{MOST_NOISE:g} can be had"
        )
    return noise


def plan_privacy(request: PlanRequest) -> PrivacyPlan:
    """Return the privacy plan of a client; its noise multiplier is calibrated if none is given.

    Args:
        request: the client's settings, schedule and model.

    Raises:
        PrivacyPlanError: no noise reaches the target ε, the accountant does not support the
            sampling under this adjacency, or the clipping does not fit the model or the noise.
    """
    privacy, kind = request.privacy, request.kind or request.privacy.release_kind
    draft = _draft_of(kind, request)
    accounting = Accounting.of(privacy, delta_of(privacy, draft.examples))
    noise = _calibrated(privacy, draft, accounting) if draft.given is None else draft.given
    plan = PrivacyPlan(
        release=draft.build(noise),
        examples=draft.examples,
        delta=accounting.delta,
        target_epsilon=privacy.target_epsilon,
        planned_steps=draft.steps,
        secure_noise=privacy.noise == "secure",
        round_steps=draft.round_steps,
        charges_itself=draft.charges_itself,
    )
    return within_budget(plan, privacy)


def within_budget(plan: PrivacyPlan, privacy: PrivacySettings) -> PrivacyPlan:
    """Return a plan with the number of its steps that fit the budget by the noise of the plan.

    Args:
        plan: the plan of a client, with the noise that hides the client; its number of affordable
            steps is ignored.
        privacy: the client's privacy settings.
    """
    affordable, target = plan.planned_steps, plan.target_epsilon
    if target is None:
        return plan
    if privacy.gives_noise:  # otherwise the noise was calibrated to all planned steps
        affordable = affordable_steps(
            plan.release,
            plan.planned_steps,
            target_epsilon=target,
            accounting=Accounting.of(privacy, plan.delta),
            noise_factor=plan.noise_factor,
        )
    return replace(plan, affordable_steps=affordable)


def _draft_of(kind: ReleaseKind, request: PlanRequest) -> Draft:
    """Return the draft of a client, made by the function `draft` of the kind's module."""
    module = kind.drafts_in or kind.name
    return import_module(f"fedsim.clients.mechanisms.{module}").draft(request)


def _calibrated(privacy: PrivacySettings, draft: Draft, accounting: Accounting) -> float:
    """Return the least noise multiplier at which the planned releases spend at most the target.

    Raises:
        PrivacyPlanError: there is no target, or no noise meets it.
    """
    target, steps = privacy.target_epsilon, max(draft.steps, draft.round_steps)
    if (rho := privacy.accountant.target_rho) is not None:
        try:
            return noise_of_rho(draft.like, steps, target_rho=rho, adjacency=accounting.adjacency)
        except ValueError as error:
            raise PrivacyPlanError(
                f"privacy.accountant.target_rho cannot be met: {error}{draft.hint}"
            ) from error
    if target is None:
        raise PrivacyPlanError("privacy needs target_epsilon or noise_multiplier")
    try:
        return noise_of_release(draft.like, steps, target_epsilon=target, accounting=accounting)
    except ValueError as error:
        most = replace(cast(Any, draft.like), noise_multiplier=MOST_NOISE)
        fit = affordable_steps(most, steps, target_epsilon=target, accounting=accounting)
        hint = draft.hint + _orders_hint(privacy)
        if fit < steps:
            raise PrivacyBudgetError(
                f"privacy.target_epsilon = {target:g} at δ = {accounting.delta:g} cannot be "
                f"met over {steps} steps: even with noise_multiplier = {MOST_NOISE:g} at most "
                f"{fit} steps fit, which is {fit // draft.round_steps} rounds{hint}"
            ) from error
        raise PrivacyPlanError(f"privacy.target_epsilon cannot be met: {error}{hint}") from error


def _orders_hint(privacy: PrivacySettings) -> str:
    """Return a hint to add larger Rényi orders; "" if the settings do not choose the orders."""
    orders = privacy.accountant.orders
    if orders is None:
        return ""
    return f"; the largest of privacy.accountant.orders is {max(orders):g}: add larger ones"
