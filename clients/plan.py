"""A client's privacy plan: its settings turned into one mechanism for the whole run."""

from dataclasses import dataclass

from fedsim.accountant import calibrate_noise_multiplier
from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.mechanism import DpSgdStep
from fedsim.clients.dp_sgd.sampling import PoissonSampling
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
    """

    step: DpSgdStep
    examples: int
    delta: float
    target_epsilon: float | None
    planned_steps: int


def plan_privacy(
    privacy: PrivacySettings, local: LocalSettings, *, examples: int, planned_rounds: int
) -> PrivacyPlan:
    """Return the plan of a client with `examples` examples that takes part in `planned_rounds`.

    Under zero-out adjacency the client's size is public and sets the sampling rate and the expected
    lot; under add/remove it is private, and the declared size takes its place. The sampling rate is
    batch_size / size, at most 1.

    Raises:
        PrivacyPlanError: no noise reaches the target ε.
    """
    public_size = privacy.declared_examples or examples
    rate = min(1.0, local.batch_size / public_size)
    steps = local.steps * planned_rounds
    return PrivacyPlan(
        step=DpSgdStep(
            sampling=PoissonSampling(rate),
            clipping=FlatClipping(privacy.max_grad_norm),
            noise_multiplier=_noise_multiplier(privacy, rate, max(steps, local.steps)),
            expected_lot=float(min(local.batch_size, public_size)),
        ),
        examples=public_size,
        delta=privacy.delta,
        target_epsilon=privacy.target_epsilon,
        planned_steps=steps,
    )


def _noise_multiplier(privacy: PrivacySettings, sampling_rate: float, steps: int) -> float:
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.target_epsilon is None:
        raise PrivacyPlanError("privacy needs target_epsilon or noise_multiplier")
    try:
        return calibrate_noise_multiplier(
            target_epsilon=privacy.target_epsilon,
            delta=privacy.delta,
            sampling_rate=sampling_rate,
            steps=steps,
            accountant=privacy.accountant,
        )
    except ValueError as error:
        raise PrivacyPlanError(f"privacy.target_epsilon cannot be met: {error}") from error
