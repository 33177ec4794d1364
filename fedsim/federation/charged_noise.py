"""Noise and clipping bounds that the parts of a test release are charged for, before round 1."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.experiment import Experiment
from fedsim.federation.aggregate_noise import sum_scale
from fedsim.federation.federation import Federation
from fedsim.noise.grid import DEVIATION
from fedsim.server.aggregation.noisy_sum import ServerNoise, add_noise


@dataclass(frozen=True)
class ChargedPart:
    """A part of a release that has its own clipping bound C and its own charged noise multiplier.

    Attributes:
        multiplier: the charged noise multiplier σ / C, for noise of standard deviation σ. For
            correlated noise, it is the multiplier of the fresh noise of a step.
        in_bounds: the factor that converts values of a release to multiples of C.
        places: the slices of a release row that belong to the part.
        scores: function from noise, in charged standard deviations, to N(0, 1) scores. None for
            Gaussian noise, whose values are the scores.
    """

    multiplier: float
    in_bounds: float
    places: Sequence[slice]
    scores: Callable[[Tensor], Tensor] | None = None

    def squares(self, noise: Tensor) -> tuple[float, int]:
        """Convert noise to N(0, 1) scores; return the sum of their squares, and their number.

        Args:
            noise: the noise of one release (rows, n).
        """
        pieces = [noise[:, place] for place in self.places]
        unit = self.in_bounds / self.multiplier
        if self.scores is not None:
            pieces, unit = [self.scores(piece.double() * unit) for piece in pieces], 1.0
        return float(_row_norms(pieces).norm() * unit) ** 2, sum(piece.numel() for piece in pieces)

    def start(self, noise: Tensor, count: int) -> Tensor:
        """Return N(0, 1) scores of a release's first noise values: float64 (m,), m <= count.

        Args:
            noise: the noise of one release (rows, n).
            count: the largest number of values to return; they are taken from the first slice of
                `places`.
        """
        first = noise[:, self.places[0]].flatten()[:count]
        noise = first.double().cpu() * (self.in_bounds / self.multiplier)
        return noise if self.scores is None else self.scores(noise)


@dataclass(frozen=True)
class Release:
    """One release of a client, measured before round 1 to test its noise and clipping.

    Attributes:
        client: the client's number.
        values: the released values (rows, n); one privacy unit changes one row.
        parts: the charged parts of a row.
        offset: the values of a row without content and noise (n,); None for zeros.
        reach: the largest norm of the content of a row, in clipping bounds. If a row sums equal
            examples, this is the number of examples.
    """

    client: int
    values: Tensor
    parts: Sequence[ChargedPart]
    offset: Tensor | None = None
    reach: float = 1.0

    @property
    def noise(self) -> Tensor:
        """The noise of a release that has no content, as a tensor (rows, n)."""
        return self.values if self.offset is None else self.values.double() - self.offset

    def contributions(self, silent: "Release") -> Iterator[tuple[float, float]]:
        """Yield two numbers for each part: the norm of the clipped content, and its rounding error.

        Both are in clipping bounds.

        Args:
            silent: the release with the same noise and no content.
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


def step_length_of(federation: Federation, client: int) -> float | None:
    """Return the grid step of noisy sums, divided by a client's sensitivity; None without sums.

    Noisy sums are integers, which stand for multiples of a grid step. The sensitivity is
    `sum_scale`: the largest change of a sum by one privacy unit of the client.

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


def server_draw(federation: Federation, size: int, *, seed: int | None, number: int) -> Tensor:
    """Return the noise that the server adds to a sum, as integers in float64 (size,).

    Args:
        federation: a federation with central trust.
        size: the number of values.
        seed: the seed of the noise; None draws the noise from the operating system's random
            numbers.
        number: the number of the round.
    """
    zeros = {"values": np.zeros(size, dtype=np.int64)}
    drawn = add_noise(zeros, ServerNoise(seed).source(number))["values"]
    return torch.from_numpy(drawn).to(federation.model.device, torch.float64)


def factor_of_charge(federation: Federation, client: int) -> float:
    """Return the noise that a client's charge relies on, over the noise that the settings ensure.

    Both are standard deviations. A factor above 1 means that the charge relies on more honest
    clients than the settings ensure for the smallest sum; it is never below 1.

    Args:
        federation: an assembled federation with privacy plans.
        client: the client's number.
    """
    part = (federation.plan.clients or ())[client].part
    if part is None:
        return 1.0
    return max(1.0, part.noise_factor / math.sqrt(honest_draws(federation.experiment)))


def honest_draws(experiment: Experiment) -> int:
    """Return the smallest number of honest noise draws in a sum that an adversary sees.

    The number is 1 if one party adds all noise. It is computed from the settings and not from the
    plans, because it serves to check the charges of the plans.
    """
    privacy, secure = experiment.privacy, experiment.secure_aggregation
    if privacy is None or secure is None or privacy.trust.name != "distributed":
        return 1
    return secure.min_clients - privacy.trust.colluding_clients
