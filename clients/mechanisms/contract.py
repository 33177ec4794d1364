"""The contract of a private release: what it charges, what a sum of it needs, how it is resumed.

Plans, rounds of clients, noisy sums and the account ask these methods, and never which release it
is. A step of DP-SGD, a whole update, votes, a trained model and noisy examples fulfil it.
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
from fedsim.clients.sampling.sampling import Charges, PoissonSampling, Sampling
from fedsim.noise.grid import nominal_multiplier
from fedsim.noise.sources import NoiseSource
from fedsim.protocol.noisy_sums import LearntBound, SumPlan


class Mechanism(ABC):
    """A private release that a client repeats; subclasses are frozen dataclasses.

    Guarantee: `charges` covers the releases for every bound that `resume` accepts.

    Attributes:
        noise_multiplier: z of one release.
        correlation: of noise from release to release; None: independent noise.
        releases_examples: whether the release is noisy examples, on which the client then trains.
        protects_client: whether everything that a client has is what one ε protects, so that the
            number of its examples is of no account.
    """

    noise_multiplier: float
    correlation: NoiseCorrelation | None = None
    protects_client: ClassVar[bool] = False
    releases_examples: ClassVar[bool] = False

    @property
    def most_examples(self) -> int | None:
        """Most examples that a client may have, for the rounding of its sums; None: any number."""
        return None

    @property
    def sampling_rate(self) -> float:
        """Probability with which the unit is in one release."""
        return 1.0

    @property
    @abstractmethod
    def mechanism(self) -> Event:
        """One release without sampling, as it is charged: Gaussian, or several jointly."""

    @property
    @abstractmethod
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier z' ≤ z, which the grid leaves."""

    @property
    def adapted_clip_norm(self) -> LearntBound | None:
        """The bound, where it is learnt; None where it is fixed."""
        return None

    @property
    def charged_multipliers(self) -> tuple[float, ...]:
        """Deviation of the noise of each part over its bound, as it is charged; a count comes last.

        It follows from the event, not from the noise: a probe compares the two.

        Raises:
            TypeError: the event is not Gaussian noise, and the kind says no deviation.
        """
        match self.mechanism:
            case Gaussian(noise_multiplier):
                return (noise_multiplier,)
            case JointGaussian(noise_multipliers):
                return tuple(noise_multipliers)
            case event:
                raise TypeError(f"no noise is known for {event!r}")

    def normal_scores(self, noise: Tensor) -> Tensor:
        """Return noise as values that are N(0, 1) where its law is the charged one, float64.

        Args:
            noise: in charged deviations, float64; Gaussian noise is its own score.
        """
        return noise

    @abstractmethod
    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return (event, count) for further releases of a client.

        Args:
            first_step: releases before.
            steps: number of further releases.
            noise_factor: noise of what is seen over the noise of the release, for a sum.
        """

    def releases_of(self, steps: int) -> int:
        """Return the releases of a round of so many local steps: one, but for steps of DP-SGD."""
        return 1

    def steps_of_round(self, planned: range, charged: range, *, has_examples: bool) -> range:
        """Return the numbers of a client's local steps in a round, which key its random streams.

        Args:
            planned: from 0 on.
            charged: numbers of the releases of the round over the client's whole life.
            has_examples: whether the client has any.
        """
        return planned

    def release_examples(
        self, features: Tensor, targets: Tensor, noise: NoiseSource
    ) -> tuple[Tensor, Tensor]:
        """Return noisy features and targets (n, ...), in the types of the given ones.

        Args:
            features: the client's examples (n, ...).
            targets: their targets (n, ...).
            noise: the client's own; used for these examples only.

        Raises:
            ValueError: the release is another one.
        """
        raise ValueError(f"{type(self).__name__} releases no examples")

    def equivalent(self, steps: int) -> tuple[Sampling, int, float]:
        """Return Gaussian releases that cost as much, for a search of the noise.

        Args:
            steps: planned releases.

        Returns:
            How an example is sampled, the number of releases, and z over their noise multiplier.
        """
        return PoissonSampling(self.sampling_rate), steps, 1.0

    def of_round(self, round_number: int) -> Self:
        """Return the release of one round; the same in all rounds but for ballots."""
        return self

    def resume(self, clip_norm: LearntBound | None) -> Self:
        """Return the release with the learnt bound; None: with the first one.

        Raises:
            ValueError: a bound is given, and none is learnt.
        """
        if clip_norm is not None:
            raise ValueError(f"{type(self).__name__} learns no bound, got {clip_norm!r}")
        return self

    def with_effective_noise(self, noise_multiplier: float) -> Self:
        """Return the release with a little more noise, so that z' is at least `noise_multiplier`.

        Raises:
            ValueError: there are so many values that rounding alone costs more.
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
        """Ratio of z to the effective noise multiplier, but for the grid."""
        return 1.0

    def release_variance(
        self, parameters: FlatParameters, lr: float | None, round_steps: int
    ) -> float | None:
        """Return the expected squared length of the noise in a model; None where it is not known.

        Args:
            parameters: of the model.
            lr: learning rate of plain SGD; None: the optimizer has a state.
            round_steps: releases of a round.
        """
        return None


class SummedMechanism(Mechanism):
    """A release that may be a part of a noisy sum, with a share of the noise or without noise."""

    @abstractmethod
    def sum_scale(self, weight: int, *, lr: float, clip_norm: float) -> float:
        """Return a_k C_k: by how much one unit of a client moves its weighted release at most.

        Args:
            weight: of the client.
            lr: learning rate of the one local step.
            clip_norm: C of an example; of no account where the unit is the client.
        """

    @abstractmethod
    def for_model(self, parameters: FlatParameters) -> Self:
        """Return the release of a model, with the noise that its grid leaves.

        Args:
            parameters: its trained parameters.

        Raises:
            NoiseRangeError: their type cannot hold the noise or the bound.
        """

    @property
    def value_noise(self) -> float:
        """Noise multiplier of the values of a release, beside a bit that a learnt bound needs."""
        return self.noise_multiplier

    def with_share(self, own: float, honest: int) -> Self:
        """Return the release with one client's share of the noise in a sum.

        Args:
            own: noise multiplier of the share, the client's weight included.
            honest: h, shares in the smallest sum.
        """
        return replace(cast(Any, self), noise_multiplier=own)

    @property
    @abstractmethod
    def largest_integer(self) -> int:
        """The largest size of an integer of a release before its noise, rounded up."""

    def of_sum(self, sums: SumPlan) -> SumPlan:
        """Return the plan of a sum of such releases.

        Args:
            sums: whose unit is the length of a step of the grid, against the gradient.
        """
        return sums

    def against_server(self) -> Self:
        """Return the release as the server sees it, which knows who takes part."""
        return self


@dataclass(frozen=True)
class ReleasedUpdates:
    """What leaves some clients, on their grids.

    Attributes:
        steps: the updates in steps of the grid, whole numbers in float64 (K, size).
        counts: the centred bit of each in steps of its grid; None where the bound is fixed.
    """

    steps: Tensor
    counts: Sequence[float | None]


class UpdateRelease(Mechanism):
    """One release of a whole update in a round, which clients train for without noise.

    Attributes:
        max_update_norm: largest L2 norm of what is left of an update after clipping.
        count_noise: noise of the bit that a learnt bound needs; None: the bound is fixed.
    """

    protects_client = True
    max_update_norm: float
    count_noise: float | None = None

    @property
    @abstractmethod
    def update_step(self) -> float:
        """Length of a step of the grid, as part of an update; 1 without noise."""

    @property
    def count_step(self) -> float:
        """The same for the bit that a learnt bound needs; 1 without noise."""
        return 1.0

    def steps_of_round(self, planned: range, charged: range, *, has_examples: bool) -> range:
        """Return the planned steps; none where there is nothing to train on."""
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
        """Return the releases of a round of clients whose mechanisms are of this kind.

        Args:
            trained: trained values (K, size).
            starts: values that training began with (K, size).
            mechanisms: bound and grid of each client.
            noises: each client's own, or zeros where another party adds it.
            has_data: whether each client has any example.
        """


class ModelRelease(Mechanism):
    """One release of a model in a round, which the release trains itself."""

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
            start: values of the global model (size,).
            features: the client's examples (n, ...).
            targets: their targets (n, ...).
            noise: the client's own.
            order: the positions 0 ... n − 1 in the order of the batches, drawn without examples.
            steps: local steps of the round.
        """


@dataclass(frozen=True)
class SumPart:
    """What a client's release is when only sums are seen.

    The release is the integers of a clipped contribution, with noise of one deviation or without.

    Attributes:
        honest: h, the fewest independent draws of noise in a sum that is opened, each as large as
            the one that the client's mechanism describes.
        adds_noise: whether the client draws its own (distributed trust); else the server draws one
            for the whole sum (central trust).
    """

    honest: int
    adds_noise: bool

    @property
    def noise_factor(self) -> float:
        """√h, rounded down: noise of the sum over that of one draw."""
        return math.sqrt(self.honest) * _ROUNDED_DOWN if self.honest > 1 else 1.0


_ROUNDED_DOWN = 1.0 - 2.0**-48  # more than the square root and the product round up
