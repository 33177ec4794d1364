"""Mechanism of a DP-SGD step: its clipping, its noise and its privacy event.

Edge cases of a step with clipping norm C, noise multiplier z, noise deviation σ = z C and expected
batch size L:

| case                          | release                                 | event                |
|-------------------------------|-----------------------------------------|----------------------|
| the batch is empty            | noise alone, divided by L               | charged as usual     |
| a gradient is NaN or infinite | that example contributes exactly 0      | charged as usual     |
| z = 0                         | the clipped sum over L, not rounded     | Gaussian(0): ε is ∞  |
| z = 0 and C infinite          | the plain sum over L                    | Gaussian(0): ε is ∞  |
| z > 0 and C infinite          | refused when the model is known         | none                 |
| σ/L, C or C/L out of range    | refused when the model is known         | none                 |
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch

from fedsim.accountant import Event, Gaussian, JointGaussian
from fedsim.accountant.groups import group_noise_multiplier
from fedsim.clients.clipping.clipping import (
    ChosenNoise,
    Clipping,
    Groups,
    NoiseAllocation,
    check_allocation,
    group_noise,
)
from fedsim.clients.correlated_noise import NoiseCorrelation
from fedsim.clients.gradients.padded_batches import padded_rows
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import BatchStatistics
from fedsim.clients.local_settings import OptimizerSettings
from fedsim.clients.mechanisms.contract import SummedMechanism
from fedsim.clients.sampling.sampling import Charges, Sampling
from fedsim.noise.correlated.run import charges_of_run
from fedsim.noise.release import NoiseRangeError, Scales, check_deviations, normal_tail, release_
from fedsim.noise.sources import (
    DEVIATION,
    SATURATION,
    NoiseSource,
    SumRounding,
    effective_multiplier,
)
from fedsim.protocol.noisy_sums import AdaptiveClipNorm

COUNT_SENSITIVITY = 0.5  # of Σ (b_i − ½), where b_i is 1 if example i is within its bound


@dataclass(frozen=True)
class DpSgdMechanism(SummedMechanism):
    """Mechanism that releases the noisy gradient of a DP-SGD step (Abadi et al. 2016, Algorithm 1).

    A step draws a batch, clips each per-example gradient, sums the gradients, adds Gaussian noise
    to the sum once, and divides by the public expected batch size. Each group of parameters may
    have a separate clipping norm and noise. Together the groups are one Gaussian release inside the
    sampling. Sums and noise are rounded to an integer grid (`fedsim.noise`), and `event` accounts
    for the rounding.

    Guarantee: one step has the privacy event `event`, under the adjacencies of `sampling`. Every
    attribute is public. Nothing released depends on the number of examples drawn except through the
    noisy sum, and an empty batch releases noise like any other.

    Attributes:
        sampling: how batches are drawn.
        clipping: how per-example gradients are clipped.
        noise_multiplier: noise multiplier of the whole release of a step.
        expected_batch: the public expected batch size, by which sums are divided.
        allocation: how the noise is divided among groups (see `group_noise`).
        max_physical_batch: largest physical batch, in examples; with None, the whole batch is in
            memory at once. It changes the order of summation, and nothing else.
        bound_groups: groups of the model's parameters, set by `for_model`, or None as long as the
            model is unknown.
        largest_batch: public upper limit of the batch size, which bounds the rounding of sums.
        correlation: the correlation of noise from step to step, or None if noise is independent.
            Correlated noise has a number of bands, and two uses of an example must be at least as
            many steps apart. All planned steps are then one event.

    Raises:
        ValueError: an attribute is outside its range, or the attributes contradict each other.
    """

    sampling: Sampling
    clipping: Clipping
    noise_multiplier: float
    expected_batch: float
    allocation: NoiseAllocation = "uniform"
    max_physical_batch: int | None = None
    bound_groups: Groups | None = None
    largest_batch: int = 0
    correlation: NoiseCorrelation | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        if not 0.0 < self.expected_batch < float("inf"):
            raise ValueError(f"expected_batch must be > 0 and finite, got {self.expected_batch!r}")
        if self.max_physical_batch is not None and self.max_physical_batch < 1:
            raise ValueError(f"max_physical_batch must be >= 1, got {self.max_physical_batch}")
        gradient_noise = self.clipping.gradient_noise(self.noise_multiplier)
        chosen = isinstance(self.allocation, ChosenNoise)  # z_m of groups leave out the counts
        check_allocation(self.allocation, gradient_noise if chosen else self.noise_multiplier)
        if self.correlation is not None:
            self._check_correlation(self.correlation)

    @cached_property
    def event(self) -> Event:
        """Privacy event including the sampling, as charged to the ledger.

        The event covers one step if batches are drawn independently. With shuffled or
        balls-and-bins batches it covers one epoch, and with cyclic batches one cycle.
        """
        return self.sampling.event(self.mechanism)

    @property
    def mechanism(self) -> Event:
        """Privacy event of a step without sampling: a Gaussian, or a `JointGaussian` of groups.

        Its noise multipliers are nominal until `for_model` reduces them by the effect of rounding
        to the integer grid. With correlated noise the event covers everything that the run releases
        about one use of an example.
        """
        return self._mechanism

    @cached_property
    def _mechanism(self) -> Event:
        parts = self._part_multipliers
        return Gaussian(parts[0]) if len(parts) == 1 else JointGaussian(parts)

    @property
    def sampling_rate(self) -> float:
        """Expected share of a client's examples that a batch contains."""
        return self.sampling.sampling_rate

    @property
    def adapted_clip_norm(self) -> AdaptiveClipNorm | None:
        """Clipping norm of the next batch under adaptive clipping, or None if it is fixed."""
        return self.clipping.adapted_clip_norm

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier of a step's whole release, reduced by the effect of integer rounding."""
        return group_noise_multiplier(self._part_multipliers)

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return the privacy events of further steps of a client, as (event, count) pairs.

        Args:
            first_step: number of steps that the client took before.
            steps: number of further steps.
            noise_factor: standard deviation of the noise that an adversary faces, divided by that
                of the step alone; above 1 where only a noisy sum is visible.

        Raises:
            ValueError: steps with correlated noise go beyond the plan, or the factor is not 1 for
                correlated noise or a joint release.
        """
        correlation, mechanism = self.correlation, self.mechanism
        if noise_factor != 1.0:
            if correlation is not None or not isinstance(mechanism, Gaussian):
                raise ValueError(
                    "the noise of a sum is known only for steps of one Gaussian release, without "
                    "correlated noise, parameter groups or adaptive clipping"
                )
            mechanism = Gaussian(noise_factor * mechanism.noise_multiplier)
        if correlation is None:
            return self.sampling.charges(mechanism, first_step, steps)
        whole = self.sampling.charges(mechanism, 0, correlation.planned_steps)
        return charges_of_run(whole, correlation.planned_steps, first_step, steps)

    @property
    def most_examples(self) -> int:
        """Largest number of examples that a client may have: the upper limit of the batch size."""
        return self.largest_batch

    def steps_of_round(self, planned: range, charged: range, *, has_examples: bool) -> range:
        """Return `charged`: a local step has the same index as the release that it makes."""
        return charged

    def releases_of(self, steps: int) -> int:
        """Return the number of releases in a round: one for each local step."""
        return steps

    def for_model(self, parameters: FlatParameters) -> Self:
        """Return the mechanism for a model; `event` then knows the model's groups of parameters.

        Args:
            parameters: the model's trained parameters.

        Raises:
            NoiseRangeError: the parameters' dtype cannot hold the noise or the clipped gradients.
            ValueError: the clipping or the noise allocation does not fit the model.
        """
        bound = replace(self, bound_groups=self.clipping.groups(parameters))
        bound.release_deviations(bound.groups(parameters), parameters.tensors[0].dtype)
        return bound

    def groups(self, parameters: FlatParameters) -> Groups:
        """Return the groups of a model's parameters, with clipping norms and sizes.

        Raises:
            ValueError: the mechanism was made for a model with another number of parameters.
        """
        if self.bound_groups is None:
            return self.clipping.groups(parameters)
        dimensions = self.bound_groups.dimensions
        if dimensions and sum(dimensions) != parameters.size:
            raise ValueError(
                f"the step is for a model with {sum(dimensions)} values, "
                f"got one with {parameters.size}"
            )
        return self.bound_groups

    def standard_deviations(self, groups: Groups) -> tuple[float, ...]:
        """Return the standard deviation of the noise on the sum of clipped gradients, by group."""
        z = self.clipping.gradient_noise(self.noise_multiplier)
        return group_noise(self.allocation, z, groups)

    def release_deviations(self, groups: Groups, dtype: torch.dtype) -> tuple[float, ...]:
        """Return the standard deviation of the noise after division by the batch size, by group.

        Args:
            groups: the groups of the model's parameters.
            dtype: dtype of the release.

        Raises:
            NoiseRangeError: the dtype cannot hold the noise or the clipped gradients.
        """
        deviations = tuple(s / self.expected_batch for s in self.standard_deviations(groups))
        if self.noise_multiplier == 0.0:  # no noise, so no distribution to preserve
            return deviations
        hint = "choose another max_grad_norm; lr can make up for it"
        if 0.0 in deviations:  # a product underflowed
            raise NoiseRangeError(f"the standard deviation of noise underflows to 0; {hint}")
        bounds = groups.bounds
        for name, sizes in (
            ("noise_multiplier · max_grad_norm / expected batch", deviations),
            ("max_grad_norm", bounds),
            ("max_grad_norm / expected batch", [bound / self.expected_batch for bound in bounds]),
        ):
            try:
                check_deviations(sizes, dtype, name)
            except NoiseRangeError as error:
                raise NoiseRangeError(f"{error}; {hint}") from error
        self._check_grid(groups)
        return deviations

    def _check_correlation(self, correlation: NoiseCorrelation) -> None:
        """Raise an error if correlated noise has no guarantee with this sampling and clipping."""
        if self.sampling.separation < correlation.bands:
            raise ValueError(
                f"two uses of an example may be {self.sampling.separation} steps apart, and "
                f"{correlation.bands} bands of correlated noise need as many steps"
            )
        if self.clipping.count_noises:
            raise ValueError("correlated noise needs a fixed clipping bound")

    def _check_grid(self, groups: Groups) -> None:
        """Raise an error if the noise is so small that usual sums would exceed the grid's range."""
        least = _BATCHES_ON_GRID * self.expected_batch * DEVIATION / SATURATION
        for sigma, bound in zip(self.standard_deviations(groups), groups.bounds, strict=True):
            if sigma < least * bound:
                raise NoiseRangeError(
                    f"a noise_multiplier of {sigma / bound:.3g} is too small for batches of "
                    f"{self.expected_batch:g}: their sums would be cut off at the end of the grid; "
                    f"set a noise_multiplier of {least:.2g} or more, or 0 for no privacy"
                )

    def grid_steps(self, groups: Groups) -> tuple[float, ...]:
        """Return the length of a step of the integer grid for each group of parameters.

        Released sums of gradients are multiples of this length. It is 2⁻²⁴ times the standard
        deviation of the noise, or 1 if the mechanism adds no noise.
        """
        sigmas = self.standard_deviations(groups)
        return tuple(sigma / DEVIATION if sigma else 1.0 for sigma in sigmas)

    @property
    def padded_rows(self) -> int:
        """Public number of rows that each client has in a padded batch."""
        return padded_rows(self.sampling.usual_batch(self.expected_batch), self.max_physical_batch)

    @cached_property
    def rounding(self) -> SumRounding:
        """Bound on the rounding error of sums of gradients, for any `max_physical_batch`."""
        rows = padded_rows(self.sampling.usual_batch(self.expected_batch))
        return SumRounding.of(self.largest_batch, rows)

    def adapt(self, statistics: BatchStatistics, noise: NoiseSource) -> Self:
        """Return the mechanism for the next batch, with the clipping norm adapted.

        Adaptive clipping uses a noisy count that is part of `event`, so call this once for each
        release. With a fixed clipping norm the method draws no noise and returns `self`.

        Args:
            statistics: counts of examples and unclipped gradients in the current batch.
            noise: the noise source of the current release.
        """
        sigmas = self.clipping.count_noises
        if not sigmas:
            return self
        # Centred, so that the presence of an example changes the count by ½ and not by 1.
        half = COUNT_SENSITIVITY * statistics.examples
        steps = [sigma / DEVIATION for sigma in sigmas]
        centred = [w - half for w in statistics.within]
        noisy = torch.tensor(
            [[count / step for count, step in zip(centred, steps, strict=True)]],
            dtype=torch.float64,
        )
        scales = Scales(noisy.new_tensor([steps]), range(1, len(steps) + 1))
        release_(noisy, [noise], scales, noisy)
        within = [count / self.expected_batch + 0.5 for count in noisy[0].tolist()]
        return self._with_clipping(self.clipping.adapt(*within))

    def resume(self, clip_norm: AdaptiveClipNorm | None) -> Self:
        """Return the mechanism that continues with an adapted clipping norm.

        Guarantee: `event` is the same for every clipping norm, so a wrong clipping norm costs
        accuracy only.

        Args:
            clip_norm: the clipping norm that adaptive clipping had reached; None keeps the first
                one.

        Raises:
            ValueError: the clipping is not adaptive, or cannot have such a clipping norm.
        """
        if clip_norm is None:
            return self
        return self._with_clipping(self.clipping.resume(clip_norm))

    def equivalent(self, steps: int) -> tuple[Sampling, int, float]:
        """Return (sampling, steps, 1.0): each DP-SGD step costs one sampled Gaussian release."""
        return self.sampling, steps, 1.0

    def sum_scale(self, weight: int, *, lr: float, clip_norm: float) -> float:
        """Return the L2 sensitivity of the client's weighted update to one example."""
        return weight * lr / self.expected_batch * clip_norm

    @property
    def largest_integer(self) -> int:
        """Upper bound of the absolute value of each integer in the clipped sum, before noise."""
        return math.ceil(self.largest_batch / self.noise_multiplier * DEVIATION * 1.001) + 1

    def release_variance(
        self, parameters: FlatParameters, lr: float | None, round_steps: int
    ) -> float | None:
        """Return the expected squared L2 norm of a step's noise in the model, or None if unknown.

        The result is None with a stateful optimizer or correlated noise, because the noise of steps
        does not simply add up. It is also None if only the client knows the adaptive clipping norm
        of each step.
        """
        bound = self.adapted_clip_norm
        if lr is None or self.correlation is not None:
            return None
        if bound is not None and (round_steps > 1 or isinstance(bound, tuple)):
            return None
        groups = self.groups(parameters)
        sizes = groups.dimensions or (parameters.size,)
        deviations = self.standard_deviations(groups)
        square = sum(d * s**2 for d, s in zip(sizes, deviations, strict=True))
        return square * (lr / self.expected_batch) ** 2

    def largest_update(
        self, optimizer: OptimizerSettings, round_steps: int, *, chance: float
    ) -> float | None:
        """Return a bound on each value of a client's update in a round, or None if none is known.

        The result is None before `for_model` was called, and under adaptive clipping.
        """
        groups = self.bound_groups
        if groups is None or self.adapted_clip_norm is not None:
            return None
        sigmas, tail = self.standard_deviations(groups), normal_tail(chance)
        if self.correlation is not None:
            tail *= self.correlation.noise_growth
        batch = self._largest_likely_batch(chance)
        sums = [batch * c + tail * s for c, s in zip(groups.bounds, sigmas, strict=True)]
        return optimizer.largest_change(max(sums) / self.expected_batch, round_steps)

    def _largest_likely_batch(self, chance: float) -> float:
        """Return a batch size that a draw exceeds with at most this chance (Bernstein 1946)."""
        mean = self.sampling_rate * self.largest_batch
        log = -math.log(chance)
        spread = log / 3.0 + math.sqrt(log**2 / 9.0 + 2.0 * log * mean * (1.0 - self.sampling_rate))
        return min(mean + spread, float(self.largest_batch))

    def _with_clipping(self, clipping: Clipping) -> Self:
        """Return the mechanism with another clipping, and its clip norms in `bound_groups`."""
        groups, bound = self.bound_groups, clipping.adapted_clip_norm
        if groups is not None and bound is not None:
            groups = replace(groups, bounds=bound if isinstance(bound, tuple) else (bound,))
        return replace(self, clipping=clipping, bound_groups=groups)

    @cached_property
    def _part_multipliers(self) -> tuple[float, ...]:
        """Return the noise multipliers of the groups, then of the counts of adaptive clipping."""
        z = self.clipping.gradient_noise(self.noise_multiplier)
        count = tuple(sigma / COUNT_SENSITIVITY for sigma in self.clipping.count_noises)
        groups = self.bound_groups
        if groups is None:
            return (z / self._column_norm, *count)
        nominal = (z,)
        if len(groups.bounds) > 1:
            sigmas = self.standard_deviations(groups)
            nominal = tuple(s / c for s, c in zip(sigmas, groups.bounds, strict=True))
        parts = zip((*nominal, *count), (*groups.dimensions, *(1 for _ in count)), strict=True)
        error = self.rounding.error
        bands = 1 if self.correlation is None else self.correlation.bands
        norm = self._column_norm
        return tuple(
            effective_multiplier(multiplier, d, error, column_norm=norm, bands=bands)
            for multiplier, d in parts
        )


_BATCHES_ON_GRID = 4.0  # a Poisson batch may be larger than expected
