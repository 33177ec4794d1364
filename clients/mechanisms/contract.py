"""Interface of all privacy mechanisms: what they release, and which privacy events they charge.

The interface is implemented by the mechanisms that release DP-SGD steps, whole updates, votes,
trained models, and noisy examples. Code that plans, trains or charges uses the interface, and does
not depend on the mechanism.
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
from fedsim.noise.correlated.run import RunCorrelation
from fedsim.noise.sources import NoiseSource, nominal_multiplier
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, SumPlan


class Mechanism(ABC):
    """Base class of privacy mechanisms that a client runs repeatedly.

    A release is one noisy output of the mechanism. Subclasses are frozen dataclasses.

    Guarantee: `charges` covers the releases for every clipping norm that `resume` accepts.

    Attributes:
        noise_multiplier: noise multiplier z of one release.
        correlation: the correlation of noise from release to release, or None if the noise of
            each release is independent.
        releases_examples: whether the release is noisy examples, on which the client then trains.
        protects_client: whether ε protects all data of a client together (client-level privacy),
            so that the number of its examples does not matter.
    """

    noise_multiplier: float
    correlation: NoiseCorrelation | RunCorrelation | None = None
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
        """Probability that an example is in a release, or the client under client-level privacy."""
        return 1.0

    @property
    @abstractmethod
    def mechanism(self) -> Event:
        """Privacy event of one release without sampling.

        The event is one Gaussian, or a `JointGaussian` if the release has several parts, such as
        groups of parameters.
        """

    @property
    @abstractmethod
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier of one release, reduced by the effect of rounding to an integer grid."""

    @property
    def adapted_clip_norm(self) -> AdaptiveClipNorm | None:
        """Current clipping norm under adaptive clipping, or None if the clipping norm is fixed."""
        return None

    @property
    def charged_multipliers(self) -> tuple[float, ...]:
        """Noise multiplier that the accountant charges for each part of a release.

        Parts are groups of parameters, followed by the counts of adaptive clipping. The values are
        read from the privacy event `mechanism`, so that noise that is drawn can be compared with
        them.

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
        """Return noise mapped to values that are N(0, 1) if the noise has the charged distribution.

        Args:
            noise: noise divided by the charged standard deviation, float64.

        Returns:
            Scores, float64, of the same shape; Gaussian noise is returned unchanged.
        """
        return noise

    @abstractmethod
    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return the privacy events of a client's further releases, as (event, count) pairs.

        Args:
            first_step: number of releases that the client made before.
            steps: number of further releases.
            noise_factor: standard deviation of the noise that an adversary faces, divided by that
                of the release alone; above 1 where only a noisy sum is visible.
        """

    def releases_of(self, steps: int) -> int:
        """Return the number of releases in a round of `steps` local steps: 1 (DP-SGD: `steps`)."""
        return 1

    def steps_of_round(self, planned: range, charged: range, *, has_examples: bool) -> range:
        """Return the indices of a client's local steps in a round.

        The index of a step seeds its random draws. A mechanism that releases each step returns
        `charged`, and any other mechanism returns `planned`.

        Args:
            planned: indices of the round's local steps, from 0 in each round.
            charged: indices of the round's releases, from 0 over the whole run of the client.
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
        """Return which Gaussian releases have the same privacy cost, for the calibration of noise.

        Args:
            steps: number of planned releases.

        Returns:
            (sampling, count, ratio): the sampling of examples, the number of Gaussian releases, and
            the noise multiplier of this mechanism divided by that of the Gaussian releases.
        """
        return PoissonSampling(self.sampling_rate), steps, 1.0

    def of_round(self, round_number: int) -> Self:
        """Return the mechanism for one round. Only the mechanism for votes depends on the round."""
        return self

    def resume(self, clip_norm: AdaptiveClipNorm | None) -> Self:
        """Return the mechanism that continues with an adapted clipping norm.

        Args:
            clip_norm: the clipping norm that adaptive clipping had reached; None keeps the first
                one.

        Raises:
            ValueError: a clipping norm is given, but the mechanism does not adapt it.
        """
        if clip_norm is not None:
            raise ValueError(f"{type(self).__name__} has no adaptive clip norm, got {clip_norm!r}")
        return self

    def with_effective_noise(self, noise_multiplier: float) -> Self:
        """Return the mechanism whose noise multiplier after rounding is at least the given one.

        Raises:
            ValueError: the release has so many values that their rounding alone costs more.
        """

        def with_noise(nominal: float) -> Self:
            return replace(cast(Any, self), noise_multiplier=nominal)

        return with_noise(
            nominal_multiplier(
                noise_multiplier,
                noise_multiplier * self._column_norm,
                lambda z: with_noise(z).effective_noise_multiplier,
            )
        )

    @property
    def _column_norm(self) -> float:
        """Factor by which correlated noise increases the sensitivity of a unit; 1 without it."""
        return 1.0 if self.correlation is None else self.correlation.column_norm

    def release_variance(
        self, parameters: FlatParameters, lr: float | None, round_steps: int
    ) -> float | None:
        """Return the expected squared L2 norm of a release's noise in a model, or None if unknown.

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
    """Base class of mechanisms whose releases may be summed over clients.

    The noise of the sum then protects each client, whether clients or the server draw it.
    """

    @abstractmethod
    def sum_scale(self, weight: int, *, lr: float, clip_norm: float) -> float:
        """Return the L2 sensitivity of the client's release after multiplication by its weight.

        Args:
            weight: the client's weight in the sum.
            lr: learning rate of the single local step.
            clip_norm: clipping norm of a per-example gradient; ignored under client-level privacy.
        """

    @abstractmethod
    def for_model(self, parameters: FlatParameters) -> Self:
        """Return the mechanism for a model; its events account for rounding to the integer grid.

        Args:
            parameters: the model's trained parameters.

        Raises:
            NoiseRangeError: the parameters' dtype cannot hold the noise or the clipping norm.
        """

    @property
    def value_noise(self) -> float:
        """Noise multiplier of the released values, without the noisy count of adaptive clipping."""
        return self.noise_multiplier

    def with_share(self, share: float, honest: int) -> Self:
        """Return the mechanism that adds only one client's share of the noise of a sum.

        Args:
            share: noise multiplier of the client's upload alone: the standard deviation of its
                noise divided by its sensitivity, `sum_scale`.
            honest: number of noise shares in the smallest sum that may be opened.
        """
        return replace(cast(Any, self), noise_multiplier=share)

    @property
    @abstractmethod
    def largest_integer(self) -> int:
        """Upper bound of the absolute value of a released integer before noise."""

    def of_sum(self, sums: SumPlan) -> SumPlan:
        """Return the `SumPlan` (public parameters of a noisy sum over clients) for these releases.

        Args:
            sums: plan for sums of gradients. Its `unit`, the value of an integer-grid step in the
                model, is negative, as descent subtracts gradients.
        """
        return sums

    def against_server(self) -> Self:
        """Return the mechanism charged for a server, which knows the clients of each round."""
        return self


@dataclass(frozen=True)
class ReleasedUpdates:
    """Released updates of K clients, in steps of the integer grid to which values are rounded.

    Attributes:
        steps: the updates in grid steps, whole numbers in float64 (K, size).
        counts: for each client, the noisy bit of adaptive clipping in grid steps (½ if the update
            is not clipped, else −½); an entry is None if the clipping norm is fixed.
    """

    steps: Tensor
    counts: Sequence[float | None]


class UpdateRelease(Mechanism):
    """Base class of mechanisms that release a whole update once a round, after noise-free training.

    Attributes:
        max_update_norm: largest L2 norm of a clipped update.
        count_noise: standard deviation of the noise on the bit that adaptive clipping releases, or
            None if the clipping norm is fixed.
    """

    protects_client = True
    max_update_norm: float
    count_noise: float | None = None

    @property
    @abstractmethod
    def update_step(self) -> float:
        """Length of an integer-grid step, in units of the update, or 1 if no noise is added."""

    @property
    def count_step(self) -> float:
        """Length of an integer-grid step for the noisy clipping bit, or 1 if no noise is added."""
        return 1.0

    def steps_of_round(self, planned: range, charged: range, *, has_examples: bool) -> range:
        """Return the planned local steps, or an empty range if the client has no examples."""
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
        """Return a round's released updates of K clients, all with mechanisms of this class.

        Args:
            trained: parameters after local training (K, size).
            starts: parameters before local training (K, size).
            mechanisms: the mechanism of each client, with its clipping norm and grid step.
            noises: the noise source of each client; it gives zeros where another party adds the
                noise.
            has_data: whether each client has any example.
        """


class ModelRelease(Mechanism):
    """Base class of mechanisms that train the client's model and release it once a round."""

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
        """Return the noisy trained model of a client, float64 (size,).

        Args:
            start: parameters of the global model (size,).
            features: the client's features (n, ...).
            targets: the client's targets (n, ...).
            noise: the client's noise source.
            order: a permutation of 0 ... n − 1 that is cut into batches (n,); it must not depend on
                the examples.
            steps: number of local steps in the round.
        """


@dataclass(frozen=True)
class SumPart:
    """Noise that hides one client in a sum, for an adversary that sees only sums over clients.

    Attributes:
        honest: the least number of independent noise draws in a sum that is opened. Each draw has
            the standard deviation of the client's mechanism.
        adds_noise: whether the client draws a share of the noise (distributed trust). Otherwise the
            client adds none, and the server draws the noise of the whole sum (central trust).
    """

    honest: int
    adds_noise: bool

    @property
    def noise_factor(self) -> float:
        """Standard deviation of a sum's noise, in units of a single draw: √honest, rounded down."""
        return math.sqrt(self.honest) * _ROUNDED_DOWN if self.honest > 1 else 1.0


_ROUNDED_DOWN = 1.0 - 2.0**-48  # more than the square root and the product round up
