"""The interface of all privacy mechanisms: privacy events, noisy sums, and how a run resumes.

Plans, rounds of clients, noisy sums and the account call these methods, and never ask which
mechanism they hold. DP-SGD steps, whole updates, votes, trained models and noisy examples
implement it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
from torch import Tensor

from fedsim.accountant import Event, Gaussian, JointGaussian
from fedsim.clients.correlated_noise import NoiseCorrelation
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import OptimizerSettings
from fedsim.clients.sampling.sampling import Charges, PoissonSampling, Sampling
from fedsim.noise.grid import nominal_multiplier
from fedsim.noise.sources import NoiseSource
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, SumPlan


class Mechanism(ABC):
    """A privacy mechanism that a client runs repeatedly; subclasses are frozen dataclasses.

    Guarantee: `charges` covers the releases for every bound that `resume` accepts.

    Attributes:
        noise_multiplier: z of one release.
        correlation: the correlation of noise from release to release, or None if the noise of
            each release is independent.
        releases_examples: whether the release is noisy examples, on which the client then trains.
        protects_client: whether ε protects all data of a client together (client-level privacy),
            so that the number of its examples does not matter.
    """

    noise_multiplier: float
    correlation: NoiseCorrelation | None = None
    protects_client: ClassVar[bool] = False
    releases_examples: ClassVar[bool] = False

    @property
    def most_examples(self) -> int | None:
        """Largest number of examples that a client may have, or None if there is no limit.

        The limit bounds the rounding error of the client's sums.
        """
        return None

    @property
    def sampling_rate(self) -> float:
        """Probability that one example (client-level privacy: the client) is in a release."""
        return 1.0

    @property
    @abstractmethod
    def mechanism(self) -> Event:
        """The privacy event of one release without sampling: one Gaussian, or a joint one."""

    @property
    @abstractmethod
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier z' ≤ z that is left after rounding to the grid."""

    @property
    def adapted_clip_norm(self) -> AdaptiveClipNorm | None:
        """The current clip norm under adaptive clipping, or None if the clip norm is fixed."""
        return None

    @property
    def charged_multipliers(self) -> tuple[float, ...]:
        """Noise multiplier of each part of a release according to `mechanism`; counts come last.

        The values are read from the privacy event, not from the noise: a probe compares the two.

        Raises:
            TypeError: the event is not Gaussian noise, and the subclass does not override this.
        """
        match self.mechanism:
            case Gaussian(noise_multiplier):
                return (noise_multiplier,)
            case JointGaussian(noise_multipliers):
                return tuple(noise_multipliers)
            case event:
                raise TypeError(f"no noise is known for {event!r}")

    def normal_scores(self, noise: Tensor) -> Tensor:
        """Return noise mapped to values that are N(0, 1) if it has the charged distribution.

        Args:
            noise: noise divided by the charged standard deviation, float64.

        Returns:
            Scores, float64, of the same shape; Gaussian noise is returned unchanged.
        """
        return noise

    @abstractmethod
    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return the privacy events of further releases of a client, as (event, count) pairs.

        Args:
            first_step: number of releases that the client made before.
            steps: number of further releases.
            noise_factor: standard deviation of the noise that an adversary faces, divided by that
                of the release alone; above 1 where only a noisy sum is visible.
        """

    def releases_of(self, steps: int) -> int:
        """Return how many releases a round of `steps` local steps makes: DP-SGD one per step."""
        return 1

    def steps_of_round(self, planned: range, charged: range, *, has_examples: bool) -> range:
        """Return the numbers of a client's local steps in a round, which key its random streams.

        Args:
            planned: numbers of the local steps within the round, from 0.
            charged: numbers of the round's releases, counted over the whole run of the client.
            has_examples: whether the client has any example.
        """
        return planned

    def release_examples(
        self, features: Tensor, targets: Tensor, noise: NoiseSource
    ) -> tuple[Tensor, Tensor]:
        """Return noisy features and targets (n, ...), in the dtypes of the given ones.

        Args:
            features: the client's features (n, ...).
            targets: the client's targets (n, ...).
            noise: the client's noise source, used for these examples only.

        Raises:
            ValueError: the mechanism does not release examples.
        """
        raise ValueError(f"{type(self).__name__} releases no examples")

    def equivalent(self, steps: int) -> tuple[Sampling, int, float]:
        """Return Gaussian releases with the same privacy cost, for noise calibration.

        Args:
            steps: number of planned releases.

        Returns:
            The sampling of examples, the number of Gaussian releases, and the ratio of this
            mechanism's z to their noise multiplier.
        """
        return PoissonSampling(self.sampling_rate), steps, 1.0

    def of_round(self, round_number: int) -> Self:
        """Return the mechanism of one round; only the mechanism of votes differs by round."""
        return self

    def resume(self, clip_norm: AdaptiveClipNorm | None) -> Self:
        """Return the mechanism with an adapted clip norm.

        Args:
            clip_norm: the clip norm that adaptive clipping had reached; None keeps the first one.

        Raises:
            ValueError: a clip norm is given, but the mechanism does not adapt it.
        """
        if clip_norm is not None:
            raise ValueError(f"{type(self).__name__} has no adaptive clip norm, got {clip_norm!r}")
        return self

    def with_effective_noise(self, noise_multiplier: float) -> Self:
        """Return the mechanism with a slightly larger z, so that z' is at least `noise_multiplier`.

        Raises:
            ValueError: the release has so many values that their rounding alone costs more.
        """

        def with_noise(nominal: float) -> Self:
            return replace(cast(Any, self), noise_multiplier=nominal)

        return with_noise(
            nominal_multiplier(
                noise_multiplier,
                noise_multiplier * self._nominal_factor,
                lambda z: with_noise(z).effective_noise_multiplier,
            )
        )

    @property
    def _nominal_factor(self) -> float:
        """Ratio of z to the effective noise multiplier, without the effect of the grid."""
        return 1.0

    def release_variance(
        self, parameters: FlatParameters, lr: float | None, round_steps: int
    ) -> float | None:
        """Return the expected squared L2 norm of the noise in a model, or None if it is unknown.

        Args:
            parameters: the model's trained parameters.
            lr: learning rate of plain SGD; None for an optimizer with a state.
            round_steps: number of releases in a round.
        """
        return None

    def largest_update(
        self, optimizer: OptimizerSettings, round_steps: int, *, chance: float
    ) -> float | None:
        """Return a bound on each value of a client's update in a round, or None if none is known.

        Args:
            optimizer: the optimizer of local steps, with the largest learning rate of the run.
            round_steps: number of releases in a round.
            chance: largest probability with which one draw of noise, or of a batch, may break the
                bound.
        """
        return None


class SummedMechanism(Mechanism):
    """A mechanism whose releases may be summed over clients, each with a share of the noise."""

    @abstractmethod
    def sum_scale(self, weight: int, *, lr: float, clip_norm: float) -> float:
        """Return a_k C_k, the L2 sensitivity of the client's weighted release.

        Args:
            weight: the client's weight in the sum.
            lr: learning rate of the single local step.
            clip_norm: C, clip norm of a per-example gradient; ignored under client-level privacy.
        """

    @abstractmethod
    def for_model(self, parameters: FlatParameters) -> Self:
        """Return the mechanism for a model; its events account for rounding to the grid.

        Args:
            parameters: the model's trained parameters.

        Raises:
            NoiseRangeError: the parameters' dtype cannot hold the noise or the clip norm.
        """

    @property
    def value_noise(self) -> float:
        """Noise multiplier of the released values, without the noisy bit of adaptive clipping."""
        return self.noise_multiplier

    def with_share(self, own: float, honest: int) -> Self:
        """Return the mechanism with one client's share of the noise in a sum.

        Args:
            own: noise multiplier of the share, multiplied by the client's weight.
            honest: h, the number of shares in the smallest sum.
        """
        return replace(cast(Any, self), noise_multiplier=own)

    @property
    @abstractmethod
    def largest_integer(self) -> int:
        """Upper bound of the absolute value of a released integer before noise."""

    def of_sum(self, sums: SumPlan) -> SumPlan:
        """Return the plan of a sum of such releases.

        Args:
            sums: plan whose unit is the length of a grid step, in the descent direction.
        """
        return sums

    def against_server(self) -> Self:
        """Return the mechanism against a server that knows which clients take part."""
        return self


@dataclass(frozen=True)
class ReleasedUpdates:
    """The released updates of K clients, in grid steps.

    Attributes:
        steps: the updates in grid steps, whole numbers in float64 (K, size).
        counts: for each client, its noisy centred bit of adaptive clipping in grid steps; an
            entry is None if the clip norm is fixed.
    """

    steps: Tensor
    counts: Sequence[float | None]


class UpdateRelease(Mechanism):
    """A mechanism that releases a client's whole update once a round, after noise-free training.

    Attributes:
        max_update_norm: largest L2 norm of a clipped update.
        count_noise: standard deviation of the noise on the bit of adaptive clipping, or None if
            the clip norm is fixed.
    """

    protects_client = True
    max_update_norm: float
    count_noise: float | None = None

    @property
    @abstractmethod
    def update_step(self) -> float:
        """Length of a grid step in units of the update; 1 without noise."""

    @property
    def count_step(self) -> float:
        """Length of a grid step in units of the bit of adaptive clipping; 1 without noise."""
        return 1.0

    def steps_of_round(self, planned: range, charged: range, *, has_examples: bool) -> range:
        """Return the planned local steps, or none if the client has no examples."""
        return planned if has_examples else range(0)

    @staticmethod
    @abstractmethod
    def release_updates(
        trained: Tensor,
        starts: Tensor,
        mechanisms: Sequence[Any],
        noises: Sequence[NoiseSource],
        has_data: Sequence[bool],
    ) -> ReleasedUpdates:
        """Return the releases of K clients in a round, whose mechanisms are all of this class.

        Args:
            trained: parameters after local training (K, size).
            starts: parameters before local training (K, size).
            mechanisms: the mechanism of each client, with its clip norm and grid.
            noises: the noise source of each client, zeros where another party adds the noise.
            has_data: whether each client has any example.
        """


class ModelRelease(Mechanism):
    """A mechanism that trains the client's model itself and releases it once a round."""

    @abstractmethod
    def release_model(
        self,
        start: Tensor,
        features: Tensor,
        targets: Tensor,
        noise: NoiseSource,
        *,
        order: np.ndarray,
        steps: int,
    ) -> Tensor:
        """Return the noisy model of a client, float64 (size,).

        Args:
            start: parameters of the global model (size,).
            features: the client's features (n, ...).
            targets: the client's targets (n, ...).
            noise: the client's noise source.
            order: a permutation of 0 ... n − 1, independent of the examples, that is cut into
                batches (n,).
            steps: number of local steps in the round.
        """


@dataclass(frozen=True)
class SumPart:
    """How the noise of a sum is drawn when an adversary sees only sums over clients.

    Each client contributes the integers of its clipped release, with its share of noise or without.

    Attributes:
        honest: h, the least number of independent noise draws in a sum that is opened, each with
            the standard deviation of the client's mechanism.
        adds_noise: whether the client draws a share of the noise (distributed trust); otherwise
            the server draws the noise of the whole sum (central trust).
    """

    honest: int
    adds_noise: bool

    @property
    def noise_factor(self) -> float:
        """√h, rounded down: standard deviation of the sum's noise over that of one draw."""
        return math.sqrt(self.honest) * _ROUNDED_DOWN if self.honest > 1 else 1.0


_ROUNDED_DOWN = 1.0 - 2.0**-48  # more than the square root and the product round up
