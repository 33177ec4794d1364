"""One DP-SGD step: its noisy gradient and its event, from one constructor.

Edge cases of a step with clipping bound C, noise multiplier z and expected lot L:

| case                          | release                                 | event                |
|-------------------------------|-----------------------------------------|----------------------|
| the lot is empty              | noise alone, divided by L               | the same, charged    |
| a gradient is NaN or infinite | that example contributes exactly 0      | the same             |
| z = 0                         | the clipped sum over L, without noise   | Gaussian(0): ε is ∞  |
| z = 0 and C infinite          | the plain sum over L                    | Gaussian(0): ε is ∞  |
| z > 0 and C infinite          | refused when the model is known         | none                 |
| σ/L, C or C/L out of range    | refused when the model is known         | none                 |
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from fedsim.accountant import Event, Gaussian, JointGaussian
from fedsim.clients.dp_sgd.clipping import Clipping, Groups
from fedsim.clients.dp_sgd.noise import NoiseRangeError, NoiseSource, check_deviations
from fedsim.clients.dp_sgd.noise_allocation import NoiseAllocation, check_allocation, group_noise
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.clip_factors import LotStatistics
from fedsim.clients.dp_sgd.sampling import Charges, Sampling
from fedsim.clients.dp_sgd.tiles import tile_rows
from fedsim.core.moved_names import moved_names_of

COUNT_SENSITIVITY = 0.5  # of Σ (b_i − ½), where b_i is 1 if example i is within its bound

if not TYPE_CHECKING:
    __getattr__ = moved_names_of(__name__)


@dataclass(frozen=True)
class DpSgdMechanism:
    """The noisy gradient of DP-SGD (Abadi et al. 2016, Algorithm 1).

    A step draws a lot, clips each per-example gradient, sums them, adds Gaussian noise to the sum
    once, and divides by the public expected lot. Groups of parameters may have bounds C_m and noise
    z_m C_m of their own: together they are one Gaussian release inside the sampling.

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

    def __post_init__(self) -> None:
        if not 0.0 < self.expected_lot < float("inf"):
            raise ValueError(f"expected_lot must be > 0 and finite, got {self.expected_lot!r}")
        if self.max_physical_batch is not None and self.max_physical_batch < 1:
            raise ValueError(f"max_physical_batch must be >= 1, got {self.max_physical_batch}")
        check_allocation(self.allocation, self.noise_multiplier)
        self.clipping.gradient_noise(self.noise_multiplier)  # refuses a count that costs more

    @property
    def event(self) -> Event:
        """The event that a step is charged as; of an epoch sampling, that of a whole epoch."""
        return self.sampling.event(self.mechanism)

    @property
    def mechanism(self) -> Event:
        """The release about a given lot: one Gaussian, or several that are one jointly."""
        parts, sigma = self._group_multipliers(), self.clipping.noise_on_count
        if sigma is not None:
            parts = (*parts, sigma / COUNT_SENSITIVITY)
        return Gaussian(parts[0]) if len(parts) == 1 else JointGaussian(parts)

    def charges(self, first_step: int, steps: int) -> Charges:
        """Return (event, count) for steps of a client.

        Args:
            first_step: steps that the client took before.
            steps: number of further steps.
        """
        return self.sampling.charges(self.mechanism, first_step, steps)

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
        return deviations

    def noise_slices(self, parameters: FlatParameters) -> list[tuple[slice, float]]:
        """Return the noise of a release: slices of a flat tensor, and σ / `expected_lot` of each.

        Slices are as long as they can be with one σ, so that groups of one σ are drawn in one go.

        Raises:
            NoiseRangeError: the model's type cannot hold the noise or the clipped gradients.
        """
        groups = self.groups(parameters)
        sigmas = self.release_deviations(groups, parameters.tensors[0].dtype)
        if len(set(sigmas)) == 1:
            return [(slice(0, parameters.size), sigmas[0])]
        pairs = zip(groups.members, sigmas, strict=True)
        of = {index: sigma for members, sigma in pairs for index in members}
        found: list[tuple[slice, float]] = []
        for index, place in enumerate(parameters.slices(range(len(parameters.tensors)))):
            if found and found[-1][1] == of[index]:
                found[-1] = (slice(found[-1][0].start, place.stop), of[index])
            else:
                found.append((place, of[index]))
        return found

    def fill_with_noise(self, parameters: FlatParameters, noise: NoiseSource, into: Tensor) -> None:
        """Overwrite a flat tensor with one release's noise, divided by `expected_lot`.

        Args:
            parameters: of the model.
            noise: the noise of this step.
            into: flat tensor (size,).

        Raises:
            NoiseRangeError: the model's type cannot hold the noise or the clipped gradients.
        """
        for place, sigma in self.noise_slices(parameters):
            noise.fill_(into[place], sigma)

    @property
    def tile_rows(self) -> int:
        """R, the public number of rows in which lots are computed (see `tiles`)."""
        return tile_rows(self.sampling.usual_lot(self.expected_lot), self.max_physical_batch)

    def adapt(self, statistics: LotStatistics, noise: NoiseSource) -> Self:
        """Return the step of the next lot, with the clipping adapted to this one.

        The count that clipping adapts to is part of `event`, so call this once for each release.
        Clipping with a fixed bound draws no noise and returns the step itself.

        Args:
            statistics: counts of the released lot.
            noise: the noise source of that release.
        """
        sigma = self.clipping.noise_on_count
        if sigma is None:
            return self
        # Centred, so that an example moves the count by ½ and not by 1, absent or present.
        centred = statistics.within[0] - COUNT_SENSITIVITY * statistics.examples
        noisy = centred + noise.fill_(torch.empty(1, dtype=torch.float64), sigma).item()
        within = noisy / self.expected_lot + 0.5
        return replace(self, clipping=self.clipping.adapt(within), bound_groups=None)

    def resume(self, clip_norm: float | None) -> Self:
        """Return the step with the adapted bound `clip_norm`; None: with its first bound.

        Guarantee: `event` is the same for every bound: a wrong one costs accuracy only.

        Raises:
            ValueError: the clipping cannot have such a bound.
        """
        if clip_norm is None:
            return self
        return replace(self, clipping=self.clipping.resume(clip_norm), bound_groups=None)

    def _group_multipliers(self) -> tuple[float, ...]:
        """Return z_m of each group, or the z of all where the groups are not known yet."""
        if self.bound_groups is None or len(self.bound_groups.bounds) == 1:
            return (self.clipping.gradient_noise(self.noise_multiplier),)
        sigmas = self.standard_deviations(self.bound_groups)
        return tuple(s / c for s, c in zip(sigmas, self.bound_groups.bounds, strict=True))
