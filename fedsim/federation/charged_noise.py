"""Test releases before round 1, and the noise and clipping bounds that they are charged for."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.clipping.adaptive import AdaptiveClipping
from fedsim.clients.clipping.clipping import Clipping
from fedsim.clients.mechanisms.dp_sgd.mechanism import COUNT_SENSITIVITY
from fedsim.experiment import Experiment
from fedsim.federation.aggregate_noise import sum_scale
from fedsim.federation.federation import Federation
from fedsim.noise.correlated.run import RunCorrelation
from fedsim.noise.sources import DEVIATION
from fedsim.server.aggregation.noisy_sum import ServerNoise, add_noise


@dataclass(frozen=True)
class ChargedPart:
    """Columns of a release with a clipping bound C and a charged noise multiplier of their own.

    Attributes:
        multiplier: the charged noise multiplier σ / C, for noise of standard deviation σ. For
            correlated noise, it is the multiplier of the fresh noise of a step.
        in_bounds: the factor that converts a released value to a multiple of C.
        places: the slices of columns that belong to this part; a release has shape (rows, n).
        scores: function from noise, in charged standard deviations, to values that are N(0, 1) if
            the charge is right. None for Gaussian noise, which needs no conversion.
    """

    multiplier: float
    in_bounds: float
    places: Sequence[slice]
    scores: Callable[[Tensor], Tensor] | None = None

    def squares(self, noise: Tensor) -> tuple[float, int]:
        """Return the sum of this part's squared noise values, and the number of these values.

        The values are first scaled so that they are N(0, 1) if the charge is right.

        Args:
            noise: the noise of one whole release (rows, n).
        """
        pieces = [noise[:, place] for place in self.places]
        unit = self.in_bounds / self.multiplier
        if self.scores is not None:
            pieces, unit = [self.scores(piece.double() * unit) for piece in pieces], 1.0
        return float(_row_norms(pieces).norm() * unit) ** 2, sum(piece.numel() for piece in pieces)

    def start(self, noise: Tensor, count: int) -> Tensor:
        """Return the first noise values of a release, a float64 tensor (m,) with m <= count.

        The values are scaled so that they are N(0, 1) if the charge is right.

        Args:
            noise: the noise of one whole release (rows, n).
            count: the largest number of values to return; they are taken from the first slice of
                `places`.
        """
        first = noise[:, self.places[0]].flatten()[:count]
        noise = first.double().cpu() * (self.in_bounds / self.multiplier)
        return noise if self.scores is None else self.scores(noise)


@dataclass(frozen=True)
class Release:
    """One test release of a client, from which its noise and clipping are measured before round 1.

    A release is the sum of noise and content, such as a batch's gradients or votes.

    Attributes:
        client: the client's number.
        values: the released values (rows, n), such as one update, or one row of votes for each
            query. One privacy unit changes one row.
        parts: the groups of columns that have their own clipping bound and noise.
        offset: the values (n,) that a row has without content and noise; None for zeros.
        reach: the largest norm that a row's content can have, in clipping bounds. If a row is a sum
            of equal examples, this is the number of examples.
    """

    client: int
    values: Tensor
    parts: Sequence[ChargedPart]
    offset: Tensor | None = None
    reach: float = 1.0

    @property
    def noise(self) -> Tensor:
        """The values (rows, n) minus the offset; pure noise if the release has no content."""
        return self.values if self.offset is None else self.values.double() - self.offset

    def contributions(self, silent: "Release") -> Iterator[tuple[float, float]]:
        """Yield for each part the norm of a privacy unit's clipped content, and a rounding error.

        The rounding error bounds the error of the norm. Both numbers are in clipping bounds. The
        norm is that of the row with the largest content.

        Args:
            silent: a release with the same noise and without content.
        """
        eps = torch.finfo(self.values.dtype).eps
        for part in self.parts:
            whole = [self.values[:, place] for place in part.places]
            moved = _row_norms(
                [piece - silent.values[:, at] for piece, at in zip(whole, part.places, strict=True)]
            )
            # Values of both releases are rounded to their type, and to whole steps of the grid.
            rounding = float((_row_norms(whole) + moved).max()) * 4.0 * eps * part.in_bounds
            width = sum(piece.shape[1] for piece in whole)
            rounding += math.sqrt(width) * part.multiplier / DEVIATION
            yield float(moved.max()) * part.in_bounds / self.reach, rounding / self.reach


def _row_norms(places: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each row over all places, each (rows, ...), as float64 (rows,)."""
    norms = [torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64) for piece in places]
    return torch.stack(norms).norm(dim=0)


@dataclass(frozen=True)
class _NotedClipping(AdaptiveClipping):
    """Adaptive clipping that notes the noisy shares by which it adapts its clipping norms."""

    noted: list[tuple[float, ...]] = field(default_factory=list[Any], compare=False)

    def adapt(self, *shares: float) -> Self:
        """Note the shares, and return the clipping rule for the next batch."""
        self.noted.append(shares)
        return super().adapt(*shares)


def with_noted_counts(clipping: Clipping) -> Clipping:
    """Return a clipping rule whose counts `noted_counts` reads; unchanged if it counts nothing."""
    if not isinstance(clipping, AdaptiveClipping):
        return clipping
    values = {entry.name: getattr(clipping, entry.name) for entry in fields(clipping)}
    return _NotedClipping(**values)


def noted_counts(clipping: Clipping, expected_batch: float, within: int) -> list[float]:
    """Return the released counts of unclipped gradients of the last step, without their content.

    Args:
        clipping: the rule of the step, made by `with_noted_counts`.
        expected_batch: the public expected batch size.
        within: number of examples in the batch that no clipping norm touches; each adds ½.
    """
    if not isinstance(clipping, _NotedClipping) or not clipping.noted:
        return []
    content = COUNT_SENSITIVITY * within
    return [(share - 0.5) * expected_batch - content for share in clipping.noted.pop()]


def step_length_of(federation: Federation, client: int) -> float | None:
    """Return the step between values of a noisy sum, divided by a client's sensitivity.

    Noisy sums are integers, which stand for multiples of this step. The sensitivity is the largest
    change of a sum by one privacy unit of the client (`sum_scale`). Without noisy sums, the result
    is None.

    Args:
        federation: an assembled federation with privacy plans.
        client: a client that takes part in sums.
    """
    plans, terms, sums = (
        federation.plan.clients,
        federation.plan.client_privacy,
        federation.plan.sums,
    )
    if plans is None or terms is None or sums is None:
        return None
    plan, rate = plans[client], federation.experiment.local.optimizer.lr
    scale = sum_scale(terms[client], plan, federation.plan.weights.values[client], rate)
    adapts = plan.release.adapted_clip_norm is not None
    return abs(sums.unit) * (terms[client].privacy.clip_norm if adapts else 1.0) / scale


def server_adds_noise(federation: Federation) -> bool:
    """Whether the server adds the noise of a sum, and the clients add none."""
    return federation.plan.sums is not None and federation.plan.sums.server_noise


def server_noise(federation: Federation, seed: int | None) -> ServerNoise:
    """Return the noise of the server of a federation with central trust, for all rounds.

    Args:
        federation: the federation.
        seed: the seed of the noise; None draws the noise from the operating system's random
            numbers.
    """
    released = next((plan.release for plan in federation.plan.clients or ()), None)
    correlation = None if released is None else released.correlation
    strategy = correlation.strategy if isinstance(correlation, RunCorrelation) else None
    return ServerNoise(seed, strategy)


class ServerDraws:
    """Noise that the server adds to sums in test rounds, as independent noise of the charged size.

    Noise that is correlated over rounds is first whitened by the charged covariance. A round's
    result is then the part of its noise that the noise of earlier rounds does not predict, scaled
    to the charged standard deviation.

    Args:
        federation: a federation with central trust.
        size: the number of values of a sum.
        seed: the seed of the noise; None draws the noise from the operating system's random
            numbers.
    """

    def __init__(self, federation: Federation, size: int, *, seed: int | None) -> None:
        self._noise, self._device = server_noise(federation, seed), federation.model.device
        self._zeros = {"values": np.zeros(size, dtype=np.int64)}
        self._rows: list[np.ndarray] = []  # of correlated noise, from round 1 on
        self._factor = np.zeros((0, 0))  # Cholesky factor of its covariance

    def of_round(self, number: int) -> Tensor:
        """Return the noise of a test round, in units of a grid step, float64 (size,)."""
        strategy = self._noise.strategy
        if strategy is None:
            return self._tensor(self._row(number))
        while len(self._rows) < number:
            self._rows.append(self._row(len(self._rows) + 1))
        if len(self._factor) < number:  # a factor of more rounds begins with that of fewer
            self._factor = np.linalg.cholesky(strategy.covariance(2 * number))
        last = np.linalg.solve(self._factor[:number, :number].T, np.eye(number)[-1])
        return self._tensor(last @ np.stack(self._rows[:number]))

    def _row(self, number: int) -> np.ndarray:
        return add_noise(self._zeros, self._noise.source(number))["values"]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device, torch.float64)


def factor_of_charge(federation: Federation, client: int) -> float:
    """Return how many times more noise a client's charge assumes than the settings ensure.

    The ratio is that of two standard deviations of the noise of a sum. It is above 1 if the charge
    assumes more honest clients than the smallest allowed sum is sure to have. It is never below 1.

    Args:
        federation: an assembled federation with privacy plans.
        client: the client's number.
    """
    part = (federation.plan.clients or ())[client].part
    if part is None:
        return 1.0
    return max(1.0, part.noise_factor / math.sqrt(honest_draws(federation.experiment)))


def honest_draws(experiment: Experiment) -> int:
    """Return the smallest number of honest parties that add noise to a sum.

    The number is 1 unless trust is distributed. It is computed from the settings alone, so that it
    can check the charges that follow from the privacy plans.
    """
    privacy, secure = experiment.privacy, experiment.secure_aggregation
    if privacy is None or secure is None or privacy.trust.name != "distributed":
        return 1
    return secure.min_clients - privacy.trust.colluding_clients
