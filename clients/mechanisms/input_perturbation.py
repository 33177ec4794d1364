"""Input perturbation: a client makes one noisy copy of each example, and trains on the copies.

| case                            | release                              | event                |
|---------------------------------|--------------------------------------|----------------------|
| features or target not finite   | noise alone in their place           | charged as usual     |
| noise multiplier 0              | the bounded examples, not rounded    | Gaussian(0): ε is ∞  |
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fedsim.accountant import Event, JointGaussian
from fedsim.accountant.groups import group_noise_multiplier
from fedsim.clients.mechanisms.bounded_examples import BoundedExamples, bounded_rows
from fedsim.clients.mechanisms.contract import Mechanism
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, check_draws, draft_of_bounded
from fedsim.clients.sampling.sampling import Charges, PoissonSampling, Sampling
from fedsim.noise.release import NoiseRangeError, check_deviations, release_
from fedsim.noise.sources import DEVIATION, SATURATION, NoiseSource, effective_multiplier


@dataclass(frozen=True)
class InputMechanism(Mechanism):
    """Mechanism that releases every example of a client once, with noise on features and target.

    Features have L2 norm at most R, and targets at most Y. Both get Gaussian noise with the noise
    multiplier √2 z, and so standard deviations √2 z R and √2 z Y. Together they are one Gaussian
    release with noise multiplier z.

    Guarantee: for each example of a client, all noisy examples together have the privacy event
    `mechanism`, under zero_out and replace_one. They are released once, before the first round.
    Rounds use only the noisy examples, so no round costs anything more.

    Proof. An example changes one noisy row alone. A row of d values is rint(x) plus noise of
    deviation 2²⁴, x = v · min(1, R / ‖v‖) · 2²⁴ / (√2 z R). In float64 ‖x‖ ≤ (1 + e) 2²⁴ / (√2 z)
    with e = (d + 32) 2⁻⁵³, and rounding adds √d / 2. So zero-out moves the integers by at most what
    `effective_multiplier` allows, and replace-one by twice that; targets likewise. Independent
    Gaussian releases of the same example are one, `JointGaussian`. ∎

    Attributes:
        noise_multiplier: noise multiplier z.
        bounds: sizes and bounds of an example; None as long as the bounds are unknown, and then
            `mechanism` ignores the effect of the grid.
    """

    releases_examples = True

    noise_multiplier: float
    bounds: BoundedExamples | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be finite, got {self.noise_multiplier!r}")

    @property
    def mechanism(self) -> Event:
        """Privacy event that the release of all noisy examples costs each example."""
        return self._release(1.0)

    @property
    def part_multipliers(self) -> tuple[float, float]:
        """Noise multipliers (features, targets), each reduced by rounding to an integer grid."""
        nominal = math.sqrt(2.0) * self.noise_multiplier
        if self.bounds is None:
            return nominal, nominal
        features, targets = (
            effective_multiplier(nominal, size, (size + 32.0) * 2.0**-53)
            for size in (self.bounds.features, self.bounds.targets)
        )
        return features, targets

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier of features and targets together, reduced by integer rounding."""
        return group_noise_multiplier(self.part_multipliers)

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return the privacy events of a client's rounds: one event in the first round, none later.

        Args:
            first_step: number of earlier rounds.
            steps: number of further rounds.
            noise_factor: standard deviation of the noise that an adversary faces, divided by that
                of the release; 1 in local trust.
        """
        return [(self._release(noise_factor), 1)] if steps and not first_step else []

    def equivalent(self, steps: int) -> tuple[Sampling, int, float]:
        """Return (sampling, 1, 1.0): all noisy examples cost one Gaussian release, unsampled."""
        return PoissonSampling(1.0), 1, 1.0

    def for_examples(self, bounds: BoundedExamples, dtype: torch.dtype) -> Self:
        """Return the mechanism for examples whose sizes and bounds are known.

        Args:
            bounds: sizes and bounds of an example.
            dtype: dtype of the features.

        Raises:
            NoiseRangeError: the dtype cannot hold the noise, or the noise is too small for the
                range of the grid.
        """
        z = math.sqrt(2.0) * self.noise_multiplier
        if z:
            check_deviations((z * bounds.max_feature_norm,), dtype, "the noise of features")
            if z < DEVIATION / SATURATION:
                raise NoiseRangeError(
                    f"noise_multiplier {self.noise_multiplier:.3g} is too small for the grid; set "
                    f"{DEVIATION / SATURATION:.2g} or more, or 0 for no privacy"
                )
        return replace(self, bounds=bounds)

    def release_examples(
        self, features: Tensor, targets: Tensor, noise: NoiseSource
    ) -> tuple[Tensor, Tensor]:
        """Return noisy features (n, ...) and targets (n, ...), in the dtypes of the given ones.

        A noisy class is the argmax of the noisy one-hot row; a noisy label of bce is rounded to 0
        or 1. Both are functions of the noisy rows.

        Guarantee: with noise, the result is a function of integers: the rounded rows within their
        bounds, plus the integers that the noise source draws.

        Args:
            features: the client's features (n, ...).
            targets: the client's targets (n, ...).
            noise: the client's noise source, used for these examples only.

        Raises:
            ValueError: `bounds` is None.
        """
        bounds = self.bounds
        if bounds is None:
            raise ValueError("noisy examples need their bounds: call for_examples first")
        x, _ = bounded_rows(features, bounds.max_feature_norm)
        y, _ = bounds.target_rows(targets)
        z = math.sqrt(2.0) * self.noise_multiplier
        lengths = [
            z * norm / DEVIATION or 1.0 for norm in (bounds.max_feature_norm, bounds.target_norm)
        ]
        rows = torch.cat([x / lengths[0], y / lengths[1]], dim=1)
        flat = rows.reshape(1, -1)  # one row of the source, example after example
        release_(flat, [noise if z else None], None, flat)
        rows = flat.view(rows.shape)
        noisy = (rows[:, : x.shape[1]] * lengths[0]).view(features.shape).to(features.dtype)
        return noisy, bounds.targets_of(rows[:, x.shape[1] :] * lengths[1], targets)

    def _release(self, noise_factor: float) -> Event:
        first, second = (noise_factor * multiplier for multiplier in self.part_multipliers)
        return JointGaussian((first, second))


def draft(request: PlanRequest) -> Draft:
    """Return the privacy plan, before noise calibration, of a client that releases noisy examples.

    Args:
        request: the client's settings, schedule and model, and the bounds of its examples.
    """
    parameters, bounds = request.parameters, request.problem

    def known(noise: float) -> InputMechanism:
        release = InputMechanism(noise)
        if parameters is None or not isinstance(bounds, BoundedExamples):
            return release
        check_draws(request.examples * (bounds.features + bounds.targets))
        return release.for_examples(bounds, parameters.tensors[0].dtype)

    return draft_of_bounded(request, InputMechanism, known)
