"""A client's privacy plan: its settings turned into one mechanism for the whole run."""

import math
from dataclasses import dataclass
from functools import lru_cache

from fedsim.accountant import (
    Gaussian,
    UnsupportedEventError,
    calibrate_noise_multiplier,
    make_accountant,
)
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.adjacency import Adjacency
from fedsim.clients.dp_sgd.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GroupClipping,
)
from fedsim.clients.dp_sgd.mechanism import DpSgdStep
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.sampling import (
    BallsAndBins,
    FixedSizeSampling,
    PoissonSampling,
    Sampling,
    ShuffledEpochs,
)
from fedsim.clients.noise_search import least_noise
from fedsim.clients.settings import LocalSettings, PrivacySettings


class PrivacyPlanError(ValueError):
    """Privacy settings that no mechanism can meet."""


@dataclass(frozen=True)
class PrivacyPlan:
    """What one client does in each step, and what it may spend in all.

    Attributes:
        step: the DP-SGD step, the same in every round.
        examples: the public client size that set the sampling rate.
        delta: δ of the client's guarantee.
        target_epsilon: ε the noise was calibrated to; None where the noise was given.
        planned_steps: steps over all rounds the client is scheduled for.
        secure_noise: lots and noise come from the operating system instead of the seed.
    """

    step: DpSgdStep
    examples: int
    delta: float
    target_epsilon: float | None
    planned_steps: int
    secure_noise: bool = False


def plan_privacy(
    privacy: PrivacySettings,
    local: LocalSettings,
    *,
    examples: int,
    planned_rounds: int,
    parameters: FlatParameters | None = None,
) -> PrivacyPlan:
    """Return the plan of a client with `examples` examples that takes part in `planned_rounds`.

    Where the client's size is public (zero-out, replace-one) it sets the sampling rate and the
    expected lot; under add/remove it is private, and the declared size takes its place.

    Args:
        privacy: the `privacy` section.
        local: the `local` section.
        examples: the client's number of examples.
        planned_rounds: rounds that the client is scheduled for.
        parameters: the model's; with them, groups of parameters are told apart in the ledger.

    Raises:
        PrivacyPlanError: no noise reaches the target ε, the accountant has no rule for the
            sampling under this adjacency, or the clipping does not fit the model.
    """
    public_size = privacy.declared_examples or examples
    sampling, expected_lot = _sampling(privacy, local.batch_size, public_size)
    _check_accountable(privacy, sampling)
    steps = local.steps * planned_rounds
    step = DpSgdStep(
        sampling=sampling,
        clipping=_clipping(privacy),
        noise_multiplier=_noise_multiplier(privacy, sampling, max(steps, local.steps)),
        expected_lot=expected_lot,
        allocation=privacy.noise_allocation or "uniform",
    )
    if parameters is not None:
        try:
            step = step.for_model(parameters)
        except ValueError as error:
            raise PrivacyPlanError(f"privacy.clipping does not fit the model: {error}") from error
    return PrivacyPlan(
        step=step,
        examples=public_size,
        delta=privacy.delta,
        target_epsilon=privacy.target_epsilon,
        planned_steps=steps,
        secure_noise=privacy.noise == "secure",
    )


def _sampling(
    privacy: PrivacySettings, batch_size: int, public_size: int
) -> tuple[Sampling, float]:
    """Return the sampling and its expected lot; lots of an epoch have at most `batch_size`."""
    lot = min(batch_size, public_size)
    batches = math.ceil(public_size / batch_size)
    match privacy.sampling:
        case "poisson":
            return PoissonSampling(min(1.0, batch_size / public_size)), float(lot)
        case "fixed_size":
            return FixedSizeSampling(public_size, lot), float(lot)
        case "shuffle":
            return ShuffledEpochs(batches), public_size / batches
        case "balls_and_bins":
            return BallsAndBins(batches), public_size / batches


def _clipping(privacy: PrivacySettings) -> Clipping:
    match privacy.clipping:
        case "flat":
            return FlatClipping(privacy.max_grad_norm)
        case "automatic":
            return AutomaticClipping(privacy.max_grad_norm)
        case "per_layer":
            return GroupClipping(privacy.max_grad_norm, bounds=privacy.clip_rule or "equal")


def _check_accountable(privacy: PrivacySettings, sampling: Sampling) -> None:
    """Refuse what the accountant cannot add up, before anything is released."""
    if privacy.adjacency not in sampling.adjacencies:
        raise PrivacyPlanError(
            f"sampling {privacy.sampling} has no guarantee under adjacency {privacy.adjacency}; "
            f"use adjacency: {' or '.join(sampling.adjacencies)}, or sampling: poisson"
        )
    accountant = make_accountant(privacy.accountant, adjacency=privacy.adjacency)
    try:
        accountant.compose(sampling.event(Gaussian(1.0)))
    except UnsupportedEventError as error:
        raise PrivacyPlanError(
            f"accountant {privacy.accountant} cannot account for sampling {privacy.sampling} under "
            f"adjacency {privacy.adjacency}: {error}; use accountant: rdp, or sampling: poisson"
        ) from error


def _noise_multiplier(privacy: PrivacySettings, sampling: Sampling, steps: int) -> float:
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.target_epsilon is None:
        raise PrivacyPlanError("privacy needs target_epsilon or noise_multiplier")
    try:
        return _calibrated(
            sampling,
            steps,
            target=privacy.target_epsilon,
            delta=privacy.delta,
            accountant=privacy.accountant,
            adjacency=privacy.adjacency,
        )
    except ValueError as error:
        raise PrivacyPlanError(f"privacy.target_epsilon cannot be met: {error}") from error


@lru_cache(maxsize=4096)  # clients of one size share a plan
def _calibrated(
    sampling: Sampling,
    steps: int,
    *,
    target: float,
    delta: float,
    accountant: AccountantName,
    adjacency: Adjacency,
) -> float:
    if isinstance(sampling, PoissonSampling):
        return calibrate_noise_multiplier(
            target_epsilon=target,
            delta=delta,
            sampling_rate=sampling.rate,
            steps=steps,
            accountant=accountant,
            adjacency=adjacency,
        )

    def epsilon(noise: float) -> float:
        account = make_accountant(accountant, adjacency=adjacency)
        for event, count in sampling.charges(Gaussian(noise), 0, steps):
            account.compose(event, count)
        return account.get_epsilon(delta)

    return least_noise(epsilon, target)
