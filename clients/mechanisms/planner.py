"""The plan of a client: one way from its settings to a release, its noise and its budget."""

from dataclasses import replace
from importlib import import_module
from typing import Any, cast

from fedsim.accountant.search import MOST_NOISE
from fedsim.clients.mechanisms.budget import affordable_steps, noise_of_release
from fedsim.clients.mechanisms.kinds import ReleaseKind
from fedsim.clients.mechanisms.plan import (
    Draft,
    PlanRequest,
    PrivacyBudgetError,
    PrivacyPlan,
    PrivacyPlanError,
    delta_of,
)
from fedsim.clients.privacy_settings import PrivacySettings


def plan_privacy(request: PlanRequest) -> PrivacyPlan:
    """Return the plan of a client.

    Args:
        request: its settings, its schedule and its model.

    Raises:
        PrivacyPlanError: no noise reaches the target ε, the accountant has no rule for the
            sampling under this adjacency, or the clipping does not fit the model or the noise.
    """
    privacy, kind = request.privacy, request.kind or request.privacy.release_kind
    draft = _draft_of(kind, request)
    delta = delta_of(privacy, draft.public_size)
    noise = _calibrated(privacy, draft, delta) if draft.given is None else draft.given
    release, target, affordable = draft.build(noise), privacy.target_epsilon, None
    if target is not None and not privacy.gives_noise:
        affordable = draft.steps  # the noise was calibrated to them
    elif target is not None:
        affordable = affordable_steps(
            release,
            draft.steps,
            target_epsilon=target,
            delta=delta,
            accountant=privacy.accounting,
            adjacency=privacy.adjacency.name,
        )
    return PrivacyPlan(
        release=release,
        examples=draft.examples,
        delta=delta,
        target_epsilon=target,
        planned_steps=draft.steps,
        affordable_steps=affordable,
        secure_noise=privacy.noise == "secure",
        round_steps=draft.round_steps,
        charges_itself=draft.charges_itself,
    )


def _draft_of(kind: ReleaseKind, request: PlanRequest) -> Draft:
    """Return the draft of a client by the function `draft` of its kind."""
    module = kind.drafts_in or kind.name
    return import_module(f"fedsim.clients.mechanisms.{module}").draft(request)


def _calibrated(privacy: PrivacySettings, draft: Draft, delta: float) -> float:
    """Return the least noise multiplier at which the planned releases spend at most the target.

    Raises:
        PrivacyPlanError: there is no target, or no noise meets it.
    """
    target, steps = privacy.target_epsilon, max(draft.steps, draft.round_steps)
    if target is None:
        raise PrivacyPlanError("privacy needs target_epsilon or noise_multiplier")
    account = {
        "delta": delta,
        "accountant": privacy.accounting,
        "adjacency": privacy.adjacency.name,
    }
    try:
        return noise_of_release(draft.like, steps, target_epsilon=target, **cast(Any, account))
    except ValueError as error:
        most = replace(cast(Any, draft.like), noise_multiplier=MOST_NOISE)
        fit = affordable_steps(most, steps, target_epsilon=target, **cast(Any, account))
        hint = draft.hint + _orders_hint(privacy)
        if fit < steps:
            raise PrivacyBudgetError(
                f"privacy.target_epsilon = {target:g} at δ = {delta:g} cannot be "
                f"met over {steps} steps: even with noise_multiplier = {MOST_NOISE:g} at most "
                f"{fit} steps fit, which is {fit // draft.round_steps} rounds{hint}"
            ) from error
        raise PrivacyPlanError(f"privacy.target_epsilon cannot be met: {error}{hint}") from error


def _orders_hint(privacy: PrivacySettings) -> str:
    """Return how few orders limit what a target affords; "" for those of the accountant."""
    orders = privacy.accountant.orders
    if orders is None:
        return ""
    return f"; the largest of privacy.accountant.orders is {max(orders):g}: add larger ones"
