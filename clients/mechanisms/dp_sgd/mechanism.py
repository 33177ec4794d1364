"""The mechanism of a DP-SGD step: its clipping, its noise and the event that is charged.

Edge cases of a step with clipping bound C, noise multiplier z and expected lot L:

| case                          | release                                 | event                |
|-------------------------------|-----------------------------------------|----------------------|
| the lot is empty              | noise alone, divided by L               | the same, charged    |
| a gradient is NaN or infinite | that example contributes exactly 0      | the same             |
| z = 0                         | the clipped sum over L, without a grid  | Gaussian(0): ε is ∞  |
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
from fedsim.clients.clipping.clipping import Clipping, Groups
from fedsim.clients.correlated_noise import NoiseCorrelation
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import LotStatistics
from fedsim.clients.gradients.tiles import tile_rows
from fedsim.clients.mechanisms.contract import SummedMechanism
from fedsim.clients.mechanisms.dp_sgd.noise_allocation import (
    ChosenNoise,
    NoiseAllocation,
    check_allocation,
    group_noise,
)
from fedsim.clients.mechanisms.noise_range import NoiseRangeError, check_deviations
from fedsim.clients.sampling.sampling import Charges, Sampling
from fedsim.noise.grid import DEVIATION, SATURATION, SumRounding, effective_multiplier
from fedsim.noise.release import release_
from fedsim.noise.sources import NoiseSource
from fedsim.protocol.noisy_sums import LearntBound

COUNT_SENSITIVITY = 0.5  # of Σ (b_i − ½), where b_i is 1 if example i is within its bound


@dataclass(frozen=True)
class DpSgdMechanism(SummedMechanism):
    """The noisy gradient of DP-SGD (Abadi et al. 2016, Algorithm 1).

    A step draws a lot, clips each per-example gradient, sums them, adds Gaussian noise to the sum
    once, and divides by the public expected lot. Groups of parameters may have bounds C_m and noise
    z_m C_m of their own: together they are one Gaussian release inside the sampling. Sums and noise
    are integers of a grid (`fedsim.noise`): `event` has the noise multipliers that this leaves.

    Guarantee: one step is `event`, under the adjacencies of `sampling`. Every attribute is public;
    nothing released depends on the number of examples drawn except through the noisy sum, and an
    empty lot releases noise like any other.

    Attributes:
        sampling: how lots are drawn.
        clipping: the bounds of an example's contribution.
        noise_multiplier: z of the whole release of a step.
        expected_lot: public number that sums are divided by.
        allocation: how groups share the noise (see `group_noise`).
        max_physical_batch: most examples in memory at once; None: the whole lot. It changes
            the order of summation, and nothing else.
        bound_groups: the groups of the model that the step is for, set by `for_model`.
        largest_lot: public number of examples that no lot exceeds: it bounds the rounding of sums.
        correlation: the correlation of noise from step to step, for lots that are as many steps
            apart as it has bands. All planned steps are then one event; None: independent noise.

    Raises:
        ValueError: an attribute is outside its range, or the attributes contradict each other.
    """

    sampling: Sampling
    clipping: Clipping
    noise_multiplier: float
    expected_lot: float
    allocation: NoiseAllocation = "uniform"
    max_physical_batch: int | None = None
    bound_groups: Groups | None = None
    largest_lot: int = 0
    correlation: NoiseCorrelation | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.expected_lot < float("inf"):
            raise ValueError(f"expected_lot must be > 0 and finite, got {self.expected_lot!r}")
        if self.max_physical_batch is not None and self.max_physical_batch < 1:
            raise ValueError(f"max_physical_batch must be >= 1, got {self.max_physical_batch}")
        gradient_noise = self.clipping.gradient_noise(self.noise_multiplier)  # of a free count
        chosen = isinstance(self.allocation, ChosenNoise)  # by group, beside what counts cost
        check_allocation(self.allocation, gradient_noise if chosen else self.noise_multiplier)
        if self.correlation is not None:
            self._check_correlation(self.correlation)

    @cached_property
    def event(self) -> Event:
        """The event of one step, or of a whole epoch or cycle of lots."""
        return self.sampling.event(self.mechanism)

    @property
    def mechanism(self) -> Event:
        """The release about a given lot: one Gaussian, or several that are one jointly.

        Noise multipliers are those that the grid leaves (`effective_multiplier`). Before
        `for_model` nothing is known of the grid, and they are the nominal ones. With correlated
        noise it is all that the run releases about one lot of an example.
        """
        parts = self._part_multipliers()
        return Gaussian(parts[0]) if len(parts) == 1 else JointGaussian(parts)

    @property
    def sampling_rate(self) -> float:
        """Expected share of a client's examples in a lot."""
        return self.sampling.sampling_rate

    @property
    def adapted_clip_norm(self) -> LearntBound | None:
        """The bound of the next lot, where clipping learns it; None where it is fixed."""
        return self.clipping.adapted_clip_norm

    @property
    def effective_noise_multiplier(self) -> float:
        """Effective noise multiplier z' ≤ z of `mechanism`, all of its parts together."""
        return group_noise_multiplier(self._part_multipliers())

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return (event, count) for steps of a client.

        Args:
            first_step: steps that the client took before.
            steps: number of further steps.
            noise_factor: noise of what is seen over the noise of the step, for a sum of releases.

        Raises:
            ValueError: steps with correlated noise go beyond the plan, or a factor other than 1
                with a joint release.
        """
        correlation, mechanism = self.correlation, self.mechanism
        if noise_factor != 1.0:
            if correlation is not None or not isinstance(mechanism, Gaussian):
                raise ValueError("noise of a sum is known for one independent Gaussian a step only")
            mechanism = Gaussian(noise_factor * mechanism.noise_multiplier)
        if correlation is None:
            return self.sampling.charges(mechanism, first_step, steps)
        whole = self.sampling.charges(mechanism, 0, correlation.planned_steps)
        return correlation.charges(whole, first_step, steps)

    @property
    def most_examples(self) -> int:
        """Most examples that a client may have: those of the largest lot."""
        return self.largest_lot

    def steps_of_round(self, planned: range, charged: range, *, has_examples: bool) -> range:
        """Return the numbers of the charged steps: every local step is a release."""
        return charged

    def releases_of(self, steps: int) -> int:
        """Return the releases of a round: every local step is one."""
        return steps

    def for_model(self, parameters: FlatParameters) -> Self:
        """Return the step for one model: its event has the noise of each group.

        Raises:
            NoiseRangeError: the model's type cannot hold the noise or the clipped gradients.
            ValueError: the clipping or the allocation does not fit the model.
        """
        bound = replace(self, bound_groups=self.clipping.groups(parameters))
        bound.release_deviations(bound.groups(parameters), parameters.tensors[0].dtype)
        return bound

    def groups(self, parameters: FlatParameters) -> Groups:
        """Return the groups of a model.

        Raises:
            ValueError: the step is bound to a model with other parameters.
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
        """Return σ_m of the noise on the clipped sum, for each group."""
        z = self.clipping.gradient_noise(self.noise_multiplier)
        return group_noise(self.allocation, z, groups)

    def release_deviations(self, groups: Groups, dtype: torch.dtype) -> tuple[float, ...]:
        """Return σ_m / L of the noise in a release, for each group.

        Args:
            groups: bounds of the model's groups.
            dtype: of the release.

        Raises:
            NoiseRangeError: the type cannot hold the noise or the clipped gradients.
        """
        deviations = tuple(s / self.expected_lot for s in self.standard_deviations(groups))
        if self.noise_multiplier == 0.0:  # no privacy, so no law to keep
            return deviations
        hint = "choose another max_grad_norm; lr can make up for it"
        if 0.0 in deviations:  # of a product that no float holds
            raise NoiseRangeError(f"the standard deviation of noise underflows to 0; {hint}")
        bounds = groups.bounds
        for what, sizes in (
            ("noise_multiplier · max_grad_norm / expected lot", deviations),
            ("max_grad_norm", bounds),
            ("max_grad_norm / expected lot", [bound / self.expected_lot for bound in bounds]),
        ):
            try:
                check_deviations(sizes, dtype, what)
            except NoiseRangeError as error:
                raise NoiseRangeError(f"{error}; {hint}") from error
        self._check_grid(groups)
        return deviations

    def _check_correlation(self, correlation: NoiseCorrelation) -> None:
        """Refuse correlated noise for which the charge would be too small."""
        if self.sampling.separation < correlation.bands:
            raise ValueError(
                f"an example's lots may be {self.sampling.separation} steps apart, and "
                f"{correlation.bands} bands of correlated noise need as many steps"
            )
        if self.clipping.count_noises:
            raise ValueError("correlated noise needs a fixed clipping bound")

    def _check_grid(self, groups: Groups) -> None:
        """Refuse noise so small that the sum of a few usual lots would leave the grid."""
        least = _LOTS_ON_GRID * self.expected_lot * DEVIATION / SATURATION
        for sigma, bound in zip(self.standard_deviations(groups), groups.bounds, strict=True):
            if sigma < least * bound:
                raise NoiseRangeError(
                    f"noise of {sigma / bound:.3g} clipping bounds is too small for lots of "
                    f"{self.expected_lot:g}: their sums would be cut off at the end of the grid; "
                    f"set a noise_multiplier of {least:.2g} or more, or 0 for no privacy"
                )

    def grid_steps(self, groups: Groups) -> tuple[float, ...]:
        """Return σ_m · 2⁻²⁴, the length of a step of each group's grid; 1 where there is no noise.

        Clipped gradients are added up in this unit.
        """
        sigmas = self.standard_deviations(groups)
        return tuple(sigma / DEVIATION if sigma else 1.0 for sigma in sigmas)

    @property
    def tile_rows(self) -> int:
        """R, the public number of rows in which lots are computed (see `tiles`)."""
        return tile_rows(self.sampling.usual_lot(self.expected_lot), self.max_physical_batch)

    @cached_property
    def rounding(self) -> SumRounding:
        """How the gradients of a lot are added up; `max_physical_batch` changes no noise."""
        rows = tile_rows(self.sampling.usual_lot(self.expected_lot))
        return SumRounding.of(self.largest_lot, rows)

    def adapt(self, statistics: LotStatistics, noise: NoiseSource) -> Self:
        """Return the step of the next lot, with the clipping adapted to this one.

        The count that clipping adapts to is part of `event`, so call this once for each release.
        Clipping with a fixed bound draws no noise and returns the step itself.

        Args:
            statistics: counts of the released lot.
            noise: the noise source of that release.
        """
        sigmas = self.clipping.count_noises
        if not sigmas:
            return self
        # Centred, so that an example moves the count by ½ and not by 1, absent or present.
        half = COUNT_SENSITIVITY * statistics.examples
        steps = [sigma / DEVIATION for sigma in sigmas]
        centred = [w - half for w in statistics.within]
        noisy = torch.tensor(
            [[one / step for one, step in zip(centred, steps, strict=True)]], dtype=torch.float64
        )
        places = [(slice(m, m + 1), noisy.new_tensor([[step]])) for m, step in enumerate(steps)]
        release_(noisy, [noise], places, noisy)
        within = [one / self.expected_lot + 0.5 for one in noisy[0].tolist()]
        return self._with_clipping(self.clipping.adapt(*within))

    def resume(self, clip_norm: LearntBound | None) -> Self:
        """Return the step with the adapted bound `clip_norm`; None: with its first bound.

        Guarantee: `event` is the same for every bound: a wrong one costs accuracy only.

        Raises:
            ValueError: the clipping cannot have such a bound.
        """
        if clip_norm is None:
            return self
        return self._with_clipping(self.clipping.resume(clip_norm))

    def equivalent(self, steps: int) -> tuple[Sampling, int, float]:
        """Return Gaussian releases that cost as much, for a search of the noise."""
        return self.sampling, steps, 1.0

    def sum_scale(self, weight: int, *, lr: float, clip_norm: float) -> float:
        """Return a_k C_k: by how much one example moves the client's weighted update at most."""
        return weight * lr / self.expected_lot * clip_norm

    @property
    def largest_integer(self) -> int:
        """The largest size of an integer of a clipped sum before its noise, rounded up."""
        return math.ceil(self.largest_lot / self.noise_multiplier * DEVIATION * 1.001) + 1

    def release_variance(
        self, parameters: FlatParameters, lr: float | None, round_steps: int
    ) -> float | None:
        """Return the expected squared length of the noise of a step in a model.

        None with a stateful optimizer or correlated noise, which add up steps in another way, and
        where the bound of each step stays with the client.
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
        return square * (lr / self.expected_lot) ** 2

    def _with_clipping(self, clipping: Clipping) -> Self:
        """Return the step with other bounds."""
        groups, bound = self.bound_groups, clipping.adapted_clip_norm
        if groups is not None and bound is not None:
            groups = replace(groups, bounds=bound if isinstance(bound, tuple) else (bound,))
        return replace(self, clipping=clipping, bound_groups=groups)

    def _part_multipliers(self) -> tuple[float, ...]:
        """Return the noise multipliers of all parts of the release: the groups and the counts."""
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
            effective_multiplier(own, d, error, column_norm=norm, bands=bands) for own, d in parts
        )

    @property
    def _nominal_factor(self) -> float:
        return self._column_norm

    @property
    def _column_norm(self) -> float:
        """By how much correlated noise enlarges what an example in one lot moves; 1 without it."""
        return 1.0 if self.correlation is None else self.correlation.column_norm


_LOTS_ON_GRID = 4.0  # Poisson lots are larger than usual ones
