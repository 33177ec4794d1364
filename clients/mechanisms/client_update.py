"""Gaussian mechanism on a client's whole update, once a round, after any local training.

| case                              | release                          | event                |
|-----------------------------------|----------------------------------|----------------------|
| the client has no examples        | noise alone                      | charged as usual     |
| an update is NaN or infinite      | noise alone                      | charged as usual     |
| noise multiplier 0                | the clipped update, not rounded  | Gaussian(0): ε is ∞  |

With correlated noise the whole run is one event, charged before a client's first release.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from fedsim.accountant import Event, Gaussian, JointGaussian, PoissonSampled
from fedsim.accountant.groups import adaptive_clip_noise_multiplier, group_noise_multiplier
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import OptimizerSettings
from fedsim.clients.mechanisms.contract import ReleasedUpdates, SummedMechanism, UpdateRelease
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, PrivacyPlanError, check_draws
from fedsim.clients.sampling.sampling import Charges, PoissonSampling, Sampling
from fedsim.noise.correlated.run import RunCorrelation, charges_of_run, strategy_of
from fedsim.noise.correlated.settings import SCHEME
from fedsim.noise.release import NoiseRangeError, check_deviations, normal_tail, release_
from fedsim.noise.sources import DEVIATION, SATURATION, NoiseSource, effective_multiplier
from fedsim.protocol.noisy_sums import CLIP_COUNT, AdaptiveClipNorm, SumPlan, check_bound

COUNT_SENSITIVITY = 0.5
"""Largest |b − ½|, where b is 1 if the update is within the bound and 0 if not."""


@dataclass(frozen=True)
class UpdateMechanism(UpdateRelease, SummedMechanism):
    """Mechanism that releases a client's clipped update with Gaussian noise, once a round.

    The update is the trained model minus the global one, in the trained parameters alone. It is
    clipped to L2 norm S and rounded to an integer grid. Its noise has standard deviation z S, with
    noise multiplier z (a larger one, `value_noise`, under adaptive clipping). Local training may
    take any number of steps by any optimizer, as only the update is released (McMahan et al. 2018,
    arXiv:1710.06963, with the noise at the client or in the sum).

    With adaptive clipping the bit b − ½ is released too, with noise σ_b, where b is 1 if the update
    is not clipped and 0 otherwise (Andrew et al. 2021, arXiv:1905.03871, Theorem 1). The server
    adapts S to these bits.

    Guarantee: a release has the privacy of its event `mechanism`, a Gaussian mechanism with the
    effective noise multiplier z' ≤ z, for every S > 0. The integers of a release have noise of
    standard deviation 2²⁴. All data of the client together move them by at most 2²⁴ / z' in L2 norm
    under zero_out, and by twice that under replace_one.

    Proof. The release adds noise of deviation 2²⁴ to rint(x), where x = u · min(1, S / ‖u‖) · 2²⁴ /
    (z S) for the update u with d values. In float64, ‖u‖ is computed as a largest value times the
    root of a sum of d squares, in any order: it is at least (1 − (d + 8) 2⁻⁵³) ‖u‖ (Higham 2002,
    section 4.2), and three more products round, so ‖x‖ ≤ (1 + e) 2²⁴ / z with e = (d + 32) 2⁻⁵³.
    Each value is rounded by at most ½, hence ‖rint(x)‖ ≤ (1 + e) 2²⁴ / z + √d / 2. Zero-out
    replaces rint(x) by 0, replace-one by another such vector. For both, the multiplier
    z' = z / (1 + 2 e + z √d 2⁻²⁴) suffices, which `effective_multiplier` returns. The bit is ±½
    with d = 1 in units of σ_b, and 0 where the update is zeroed out. Two independent Gaussian
    releases are one, `JointGaussian`. ∎

    With correlated noise, which the server adds to sums of updates, the event is that of all
    releases of the run about the client (docs/explain/proofs.md).

    Attributes:
        max_update_norm: clipping norm S of the update.
        noise_multiplier: noise multiplier z of the whole release of a round.
        dimensions: number d of trained parameters of the model; 0 as long as it is unknown, and
            then `mechanism` ignores the effect of the grid.
        count_noise: standard deviation σ_b of the noise on the bit of adaptive clipping, or None if
            S is fixed.
        participation_rate: probability that the client is in a round, if the draw of clients is
            secret; otherwise 1.
        correlation: the correlation of the server's noise from round to round, or None if the noise
            of each round is independent.

    Raises:
        ValueError: an attribute is outside its range, or the bit alone costs more privacy than z
            allows.
    """

    max_update_norm: float
    noise_multiplier: float
    dimensions: int = 0
    count_noise: float | None = None
    participation_rate: float = 1.0
    correlation: RunCorrelation | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        check_bound(self.max_update_norm)
        if not 0.0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be finite, got {self.noise_multiplier!r}")
        if not 0.0 < self.participation_rate <= 1.0:
            rate = self.participation_rate
            raise ValueError(f"participation_rate must be in (0, 1], got {rate!r}")
        count = self.count_noise
        if self.correlation is not None and (count is not None or self.participation_rate < 1.0):
            raise ValueError("correlated noise needs a fixed clip norm and public participation")
        if count is not None and count <= COUNT_SENSITIVITY * self.noise_multiplier:
            raise ValueError(
                f"adaptive clipping needs count noise > noise_multiplier / 2 = "
                f"{COUNT_SENSITIVITY * self.noise_multiplier:.6g}, got {count:.6g}: the bit of the "
                "clipped update alone would spend the whole budget; ask more clients in a round "
                "(the default count noise is federation.clients_per_round / 20), set more "
                "clipping.count_noise, or clipping: flat"
            )

    @property
    def value_noise(self) -> float:
        """Noise multiplier of the update alone, not counting the noisy bit of adaptive clipping."""
        z = self.noise_multiplier
        if self.count_noise is None or z == 0.0:
            return z
        return adaptive_clip_noise_multiplier(z, self.count_noise)

    @property
    def mechanism(self) -> Event:
        """Privacy event of one round: the noisy update, and with adaptive clipping a noisy bit.

        With correlated noise it is the event of the whole run.
        """
        return self._release(1.0)

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier of a round's whole release, reduced by the effect of integer rounding.

        The release is the noisy update and, under adaptive clipping, the noisy clipping bit.
        """
        return group_noise_multiplier(self._part_multipliers)

    @property
    def sampling_rate(self) -> float:
        """Probability that the client is in a round."""
        return self.participation_rate

    @property
    def adapted_clip_norm(self) -> float | None:
        """Clipping norm of the update under adaptive clipping, or None if it is fixed."""
        return None if self.count_noise is None else self.max_update_norm

    @property
    def update_step(self) -> float:
        """Length of an integer-grid step, in units of the update, or 1 if no noise is added."""
        return self.value_noise * self.max_update_norm / DEVIATION or 1.0

    @property
    def count_step(self) -> float:
        """Length of an integer-grid step for the noisy clipping bit, or 1 if no noise is added."""
        noisy = self.count_noise is not None and self.noise_multiplier
        return (self.count_noise or 0.0) / DEVIATION if noisy else 1.0

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return the privacy events of a client's releases, as (event, count) pairs.

        Args:
            first_step: number of earlier releases; it does not change the result.
            steps: number of further releases, one a round.
            noise_factor: standard deviation of the noise that an adversary faces, divided by that
                of the release alone; above 1 where only a noisy sum is visible.

        Raises:
            ValueError: releases with correlated noise go beyond the plan.
        """
        event, rate = self._release(noise_factor), self.participation_rate
        if self.correlation is not None:
            planned = self.correlation.planned_steps
            return charges_of_run([(event, 1)], planned, first_step, steps)
        return [(event if rate == 1.0 else PoissonSampled(rate, event), steps)] if steps else []

    def equivalent(self, steps: int) -> tuple[Sampling, int, float]:
        """Return (sampling, count, 1.0): Gaussian releases with the same privacy cost.

        The count is `steps`, or 1 with correlated noise, where the whole run is one release.
        """
        count = steps if self.correlation is None else 1
        return PoissonSampling(self.sampling_rate), count, 1.0

    def for_model(self, parameters: FlatParameters) -> Self:
        """Return the mechanism for a model; its events account for rounding to the integer grid.

        Args:
            parameters: the model's trained parameters.

        Raises:
            NoiseRangeError: the parameters' dtype cannot hold the noise or the clipped update.
        """
        z, bound = self.value_noise, self.max_update_norm
        dtype = parameters.tensors[0].dtype
        if z:
            check_deviations((bound,), dtype, "max_update_norm")
            check_deviations((z * bound,), dtype, "noise_multiplier · max_update_norm")
            if z < DEVIATION / SATURATION:
                raise NoiseRangeError(
                    f"noise_multiplier {z:.3g} is too small for the grid; set "
                    f"{DEVIATION / SATURATION:.2g} or more, or 0 for no privacy"
                )
        return replace(self, dimensions=parameters.size)

    def sum_scale(self, weight: int, *, lr: float, clip_norm: float) -> float:
        """Return the weight times the clipping norm, the L2 sensitivity of the weighted update."""
        return weight * self.max_update_norm

    def of_sum(self, sums: SumPlan) -> SumPlan:
        """Return the `SumPlan` (public parameters of a noisy sum over clients) for sums of updates.

        Args:
            sums: plan for sums of gradients. Its `unit`, the value of an integer-grid step, is
                negative, as descent subtracts gradients. The plan for updates has the opposite
                sign, and also sums the noisy bits of adaptive clipping, if any.
        """
        if self.count_noise is None:
            return replace(sums, unit=-sums.unit)
        return replace(
            sums,
            unit=-sums.unit / self.max_update_norm,  # the unit at S = 1
            shapes={**sums.shapes, CLIP_COUNT: (1,)},
            count_unit=self.count_step,
        )

    def against_server(self) -> Self:
        """Return the mechanism with participation rate 1: the server knows a round's clients."""
        return replace(self, participation_rate=1.0)

    def release_variance(
        self, parameters: FlatParameters, lr: float | None, round_steps: int
    ) -> float | None:
        """Return the expected squared L2 norm of a round's noise."""
        return parameters.size * (self.value_noise * self.max_update_norm) ** 2

    def largest_update(
        self, optimizer: OptimizerSettings, round_steps: int, *, chance: float
    ) -> float | None:
        """Return a bound on each value of a client's update, or None under adaptive clipping."""
        if self.count_noise is not None:
            return None
        return self.max_update_norm * (1.0 + normal_tail(chance) * self.value_noise)

    def with_share(self, share: float, honest: int) -> Self:
        """Return the mechanism that adds only one client's share of the noise of a sum.

        Args:
            share: noise multiplier of the client's weighted update alone: the standard deviation of
                its noise divided by its sensitivity, `sum_scale`.
            honest: number h of noise shares in the smallest sum that may be opened. The share of
                the bit's noise has standard deviation σ_b / √h, with σ_b = `count_noise`.
        """
        if self.count_noise is None:
            return replace(self, noise_multiplier=share)
        count = self.count_noise / math.sqrt(honest)
        together = group_noise_multiplier((share, count / COUNT_SENSITIVITY))
        return replace(self, noise_multiplier=together, count_noise=count)

    @property
    def largest_integer(self) -> int:
        """Upper bound of the absolute value of a released integer before noise."""
        parts = [self.value_noise]
        if self.count_noise is not None:
            parts.append(self.count_noise / COUNT_SENSITIVITY)
        return math.ceil(DEVIATION / min(parts) * 1.001) + 1

    @staticmethod
    def release_updates(
        trained: Tensor,
        starts: Tensor,
        mechanisms: Sequence["UpdateMechanism"],
        noises: Sequence[NoiseSource],
        has_data: Sequence[bool],
    ) -> ReleasedUpdates:
        """Return the released updates of K clients in a round.

        Guarantee: with noise, a client's result is a function of integers: the rounded clipped
        update and bit, limited to ±2⁵¹, plus the integers that its noise source draws. A client
        without data adds 0 to all of them, as zero-out adjacency says.

        Args:
            trained: parameters after local training (K, size).
            starts: parameters before local training (K, size).
            mechanisms: the mechanism of each client, with its clipping norm and grid step.
            noises: the noise source of each client; it gives zeros where another party adds the
                noise.
            has_data: whether each client has any example.
        """
        updates = trained.double() - starts.double()
        bounds = updates.new_tensor([mechanism.max_update_norm for mechanism in mechanisms])
        lengths = updates.new_tensor([mechanism.update_step for mechanism in mechanisms])
        clipped, within = clipped_updates(updates, bounds, lengths)
        learns = mechanisms[0].count_noise is not None
        if learns:
            bits = [
                (COUNT_SENSITIVITY if inside else -COUNT_SENSITIVITY) * has / mechanism.count_step
                for inside, has, mechanism in zip(
                    within.tolist(), has_data, mechanisms, strict=True
                )
            ]
            clipped = torch.cat([clipped, clipped.new_tensor(bits).unsqueeze(1)], 1)
        sources = [
            noise if mechanism.noise_multiplier else None
            for noise, mechanism in zip(noises, mechanisms, strict=True)
        ]
        release_(clipped, sources, None, clipped)
        if not learns:
            return ReleasedUpdates(clipped, [None] * len(clipped))
        return ReleasedUpdates(clipped[:, :-1], clipped[:, -1].tolist())

    def resume(self, clip_norm: AdaptiveClipNorm | None) -> Self:
        """Return the mechanism with the clipping norm that the server has adapted.

        Guarantee: `mechanism` is the same for every clipping norm, so a wrong clipping norm costs
        accuracy only.

        Args:
            clip_norm: the adapted clipping norm; None keeps the first one.

        Raises:
            ValueError: the clipping norm is fixed, or the value is no valid clipping norm.
        """
        if clip_norm is None:
            return self
        if self.count_noise is None:
            raise ValueError(f"max_update_norm is fixed, got an adapted one of {clip_norm!r}")
        return replace(self, max_update_norm=check_bound(clip_norm))

    def _release(self, noise_factor: float) -> Event:
        parts = tuple(noise_factor * multiplier for multiplier in self._part_multipliers)
        return Gaussian(parts[0]) if len(parts) == 1 else JointGaussian(parts)

    @cached_property
    def _part_multipliers(self) -> tuple[float, ...]:
        """Noise multipliers of update and bit that are left after rounding.

        With correlated noise, the one of the whole run.
        """
        count = () if self.count_noise is None else (self.count_noise / COUNT_SENSITIVITY,)
        error = (self.dimensions + 32.0) * 2.0**-53
        if self.correlation is not None:
            return (
                self.correlation.effective_multiplier(self.value_noise, self.dimensions, error),
            )
        if not self.dimensions or not self.noise_multiplier:
            return (self.value_noise, *(() if not self.noise_multiplier else count))
        update = effective_multiplier(self.value_noise, self.dimensions, error)
        return (update, *(effective_multiplier(multiplier, 1, 0.0) for multiplier in count))


def clipped_updates(updates: Tensor, bounds: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Clip updates to `bounds`, and return them in steps of the integer grid.

    Guarantee: a row of the result has an L2 norm of at most (1 + (d + 32) 2⁻⁵³) · bound / length
    and depends on the same row of `updates` alone. An update with a value that is not finite
    becomes 0.

    Args:
        updates: updates of K clients, float64 (K, d).
        bounds: clipping norm of each client, float64 (K,).
        lengths: length of a step of each client's integer grid, float64 (K,).

    Returns:
        The clipped updates in grid steps (K, d), and whether each update was within its bound and
        so needed no clipping (K,).
    """
    largest = updates.abs().amax(1)
    finite = largest.isfinite()
    updates = updates.masked_fill(~finite.unsqueeze(1), 0.0)
    # Divided by its largest value, so that no square over- or underflows.
    largest = torch.where(finite & (largest > 0.0), largest, 1.0)
    norms = largest * (updates / largest.unsqueeze(1)).square_().sum(1).sqrt()
    within = norms <= bounds
    factors = torch.where(within, 1.0, bounds / norms) / lengths
    return updates * factors.unsqueeze(1), within & finite


def draft(request: PlanRequest) -> Draft:
    """Return the privacy plan, before noise calibration, of a client that releases whole updates.

    Args:
        request: the client's settings, schedule and model; its data and `local` are not used.

    Raises:
        PrivacyPlanError: the noise is correlated, and the schedule does not keep the rounds of a
            client apart.
    """
    privacy, rounds, parameters = request.privacy, request.planned_rounds, request.parameters
    rate, clipping = 1.0 if request.drawn is None else request.drawn, privacy.clipping
    correlation = _correlation(request)
    count_noise = clipping.count_noise if clipping.name == "adaptive" else None

    def build(noise: float) -> UpdateMechanism:
        try:
            update = UpdateMechanism(
                privacy.clip_norm,
                noise,
                count_noise=count_noise,
                participation_rate=rate,
                correlation=correlation,
            )
            if parameters is not None:
                draws = rounds if correlation is None else 2 * correlation.participation.rounds
                check_draws(draws * (parameters.size + 1))
                update = update.for_model(parameters)
            exact = parameters is None and correlation is None
            if privacy.noise_multiplier is None and not exact:
                update = update.with_effective_noise(noise)
        except ValueError as error:
            raise PrivacyPlanError(f"the release of a client's update fails: {error}") from error
        return update

    return Draft(
        examples=0,
        steps=rounds,
        given=privacy.noise_multiplier,
        like=UpdateMechanism(1.0, 1.0, participation_rate=rate, correlation=correlation),
        build=build,
        charges_itself=request.drawn is None,
    )


def _correlation(request: PlanRequest) -> RunCorrelation | None:
    """Return the correlation of the server's noise over the rounds of the run, or None."""
    settings, participation = request.privacy.noise_correlation, request.separation
    if settings.name == "none":
        return None
    if participation is None:
        raise PrivacyPlanError(
            "privacy.noise_correlation needs rounds of each client that are far apart; set "
            f"federation.participation to {SCHEME}"
        )
    if request.planned_rounds > participation.max_rounds:
        raise PrivacyPlanError(
            f"a client is scheduled for {request.planned_rounds} rounds, and its noise is charged "
            f"for at most {participation.max_rounds}"
        )
    try:
        return RunCorrelation(strategy_of(settings, participation), participation)
    except ValueError as error:
        raise PrivacyPlanError(f"privacy.noise_correlation cannot be used: {error}") from error
