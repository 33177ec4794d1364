"""The plan of a client: one way from its settings to a release, its noise and its budget."""

from dataclasses import replace
from typing import Any, cast

from fedsim.accountant.search import MOST_NOISE
from fedsim.clients.budget.affordable_steps import affordable_steps
from fedsim.clients.budget.noise_search import noise_of_release
from fedsim.clients.budget.plan import (
    Draft,
    PrivacyBudgetError,
    PrivacyPlan,
    PrivacyPlanError,
    delta_of,
)
from fedsim.clients.dp_sgd.draft import draft_of_steps
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.perturbation.bounds import BoundedExamples
from fedsim.clients.perturbation.draft import draft_of_perturbation
from fedsim.clients.perturbation.problem import ConvexProblem
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.updates.ballots import Ballots
from fedsim.clients.updates.draft import draft_of_updates, draft_of_votes


def plan_privacy(
    privacy: PrivacySettings,
    local: LocalSettings,
    *,
    examples: int,
    planned_rounds: int,
    planned_steps: int | None = None,
    parameters: FlatParameters | None = None,
    drawn: float | None = None,
    problem: ConvexProblem | BoundedExamples | None = None,
    ballots: Ballots | None = None,
) -> PrivacyPlan:
    """Return the plan of a client with `examples` examples that takes part in `planned_rounds`.

    Where the unit is the client, a round is one release, and `examples` and `local` say nothing.

    Args:
        privacy: the `privacy` section.
        local: the `local` section.
        examples: the client's number of examples.
        planned_rounds: rounds that the client is scheduled for.
        planned_steps: steps over these rounds; None: whole rounds.
        parameters: of what the client sends; with them, the ledger records each group of them.
        drawn: probability with which the client is in each of the rounds, where the unit is the
            client and nobody but the server learns who is; None: it is in all of them.
        problem: the convex problem of perturbation output, or the bounds of an example of input;
            None: the plan has no model, as that of a verification.
        ballots: of a client that votes; None: it trains.

    Raises:
        PrivacyPlanError: no noise reaches the target ε, the accountant has no rule for the
            sampling under this adjacency, or the clipping does not fit the model or the noise.
    """
    if ballots is not None:
        counts = None if parameters is None else parameters.size
        draft = draft_of_votes(privacy, ballots, planned_rounds, counts)
    elif privacy.unit == "client":
        draft = draft_of_updates(privacy, planned_rounds, parameters, drawn)
    elif privacy.perturbation != "gradient":
        draft = draft_of_perturbation(privacy, local, examples, planned_rounds, parameters, problem)
    else:
        draft = draft_of_steps(
            privacy,
            local,
            examples=examples,
            planned_rounds=planned_rounds,
            planned_steps=planned_steps,
            parameters=parameters,
        )
    return _plan(privacy, draft)


def _plan(privacy: PrivacySettings, draft: Draft) -> PrivacyPlan:
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
