"""Input perturbation: one noisy copy of each example, made once, and training on the copies.

| case                            | release                              | event                |
|---------------------------------|--------------------------------------|----------------------|
| features or target not finite   | noise alone in their place           | the same             |
| z = 0                           | the bounded examples, off the grid   | Gaussian(0): ε is ∞  |
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
from fedsim.clients.mechanisms.noise_range import NoiseRangeError, check_deviations
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, check_draws, draft_of_bounded
from fedsim.clients.sampling.sampling import Charges, PoissonSampling, Sampling
from fedsim.noise.grid import DEVIATION, SATURATION, effective_multiplier
from fedsim.noise.release import release_
from fedsim.noise.sources import NoiseSource


@dataclass(frozen=True)
class InputMechanism(Mechanism):
    """Every example of a client with Gaussian noise: features and target in one release.

    Features are bounded by R and targets by Y. Both get the noise multiplier √2 z: deviations √2 z
    R and √2 z Y. Together they are one Gaussian release with z.

    Guarantee: all noisy examples of a client together are `mechanism` for each of its examples,
    under zero_out and replace_one. They are released once, before the first round. Every round is a
    function of them, and costs nothing.

    Proof. One example changes its own noisy row alone. A row of d values is rint(x) plus noise of
    deviation 2²⁴, x = v · min(1, R / ‖v‖) · 2²⁴ / (√2 z R). In float64 ‖x‖ ≤ (1 + e) 2²⁴ / (√2 z)
    with e = (d + 32) 2⁻⁵³, and rounding adds √d / 2. So zero-out moves the integers by at most what
    `effective_multiplier` allows, and replace-one by twice that; targets likewise. Independent
    Gaussian releases of the same example are one, `JointGaussian`. ∎

    Attributes:
        noise_multiplier: z.
        bounds: sizes and bounds of an example; None: not known, and the grid takes nothing.
    """

    releases_examples = True

    noise_multiplier: float
    bounds: BoundedExamples | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be finite, got {self.noise_multiplier!r}")

    @property
    def mechanism(self) -> Event:
        """The release of all noisy examples, as one example sees it."""
        return self._release(1.0)

    @property
    def part_multipliers(self) -> tuple[float, float]:
        """Effective noise multipliers of features and targets."""
        own = math.sqrt(2.0) * self.noise_multiplier
        if self.bounds is None:
            return own, own
        features, targets = (
            effective_multiplier(own, size, (size + 32.0) * 2.0**-53)
            for size in (self.bounds.features, self.bounds.targets)
        )
        return features, targets

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier z' ≤ z of `mechanism`, both of its parts together."""
        return group_noise_multiplier(self.part_multipliers)

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return (event, count) for rounds of a client: all of the cost before the first one.

        Args:
            first_step: rounds before.
            steps: number of further rounds.
            noise_factor: noise of what is seen over the noise of the release; 1 in local trust.
        """
        return [(self._release(noise_factor), 1)] if steps and not first_step else []

    def equivalent(self, steps: int) -> tuple[Sampling, int, float]:
        """Return the one release of all noisy examples."""
        return PoissonSampling(1.0), 1, 1.0

    def for_examples(self, bounds: BoundedExamples, dtype: torch.dtype) -> Self:
        """Return the mechanism for examples of known sizes and bounds.

        Args:
            bounds: of an example.
            dtype: type of the features.

        Raises:
            NoiseRangeError: the type cannot hold the noise, or the noise is too small for the grid.
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
        """Return noisy features (n, ...) and targets, in the types of the given ones.

        A noisy class is the one with the largest noisy value of its one-hot row; a noisy label of
        bce is 0 or 1, whichever is nearer. Both are functions of the noisy rows.

        Guarantee: with noise, the result is a function of whole numbers of the grid: the rounded
        bounded rows plus the draws of the source.

        Args:
            features: the client's examples (n, ...).
            targets: their targets (n, ...).
            noise: the client's own; used for these examples only.

        Raises:
            ValueError: the bounds of an example are not known.
        """
        bounds = self.bounds
        if bounds is None:
            raise ValueError("noisy examples need the bounds of an example")
        x, _ = bounded_rows(features, bounds.max_feature_norm)
        y, _ = bounds.target_rows(targets)
        z = math.sqrt(2.0) * self.noise_multiplier
        lengths = [
            z * one / DEVIATION or 1.0 for one in (bounds.max_feature_norm, bounds.target_norm)
        ]
        rows = torch.cat([x / lengths[0], y / lengths[1]], dim=1)
        flat = rows.reshape(1, -1)  # one row of the source, example after example
        whole = slice(0, flat.shape[1])
        release_(flat, [noise if z else None], [(whole, flat.new_ones(1, 1))], flat)
        rows = flat.view(rows.shape)
        noisy = (rows[:, : x.shape[1]] * lengths[0]).view(features.shape).to(features.dtype)
        return noisy, bounds.targets_of(rows[:, x.shape[1] :] * lengths[1], targets)

    def _release(self, noise_factor: float) -> Event:
        first, second = (noise_factor * one for one in self.part_multipliers)
        return JointGaussian((first, second))


def draft(request: PlanRequest) -> Draft:
    """Return the draft of a client that releases noisy examples.

    Args:
        request: its settings, its schedule, its model, and the bounds of an example.
    """
    parameters, bounds = request.parameters, request.problem

    def known(noise: float) -> InputMechanism:
        release = InputMechanism(noise)
        if parameters is None or not isinstance(bounds, BoundedExamples):
            return release
        check_draws(request.examples * (bounds.features + bounds.targets))
        return release.for_examples(bounds, parameters.tensors[0].dtype)

    return draft_of_bounded(request, InputMechanism, known)
