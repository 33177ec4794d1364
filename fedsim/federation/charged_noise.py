"""What a probed release is charged as, part by part: from its event, not from its noise."""

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
    """A part of a release with a bound and a noise multiplier of its own, as it is charged.

    Attributes:
        multiplier: charged σ / C; of correlated noise, that of the fresh noise.
        in_bounds: a value of 1 of a release, in bounds C.
        places: slices of the part in a row of a release.
        scores: returns noise in charged deviations as N(0, 1); None: Gaussian noise is its own.
    """

    multiplier: float
    in_bounds: float
    places: Sequence[slice]
    scores: Callable[[Tensor], Tensor] | None = None

    def squares(self, noise: Tensor) -> tuple[float, int]:
        """Return the sum of squares of the scores of noise (rows, n), and their count."""
        found = [noise[:, place] for place in self.places]
        unit = self.in_bounds / self.multiplier
        if self.scores is not None:
            found, unit = [self.scores(one.double() * unit) for one in found], 1.0
        return float(_row_norms(found).norm() * unit) ** 2, sum(one.numel() for one in found)

    def start(self, noise: Tensor, count: int) -> Tensor:
        """Return the scores of the first noise values of a release, float64.

        Args:
            noise: of one release (rows, n).
            count: most values, of the first place.
        """
        first = noise[:, self.places[0]].flatten()[:count]
        noise = first.double().cpu() * (self.in_bounds / self.multiplier)
        return noise if self.scores is None else self.scores(noise)


@dataclass(frozen=True)
class Release:
    """One release of a client in a probe.

    Attributes:
        client: the client.
        values: (rows, n); an example, or all that a client has, moves one row.
        parts: of a row, as they are charged.
        offset: values of a row without content and noise (n,); None: zeros.
        reach: bounds by which the content may move a row: the number of equal examples.
    """

    client: int
    values: Tensor
    parts: Sequence[ChargedPart]
    offset: Tensor | None = None
    reach: float = 1.0

    @property
    def noise(self) -> Tensor:
        """The noise of a release without content (rows, n)."""
        return self.values if self.offset is None else self.values.double() - self.offset

    def contributions(self, silent: "Release") -> Iterator[tuple[float, float]]:
        """Yield the norm of the content's contribution to each part, in bounds, and its rounding.

        Args:
            silent: the release with the same noise and without content.
        """
        eps = torch.finfo(self.values.dtype).eps
        for part in self.parts:
            whole = [self.values[:, place] for place in part.places]
            moved = _row_norms(
                [one - silent.values[:, at] for one, at in zip(whole, part.places, strict=True)]
            )
            # Values of both releases are rounded to their type, and to whole steps of the grid.
            rounding = float((_row_norms(whole) + moved).max()) * 4.0 * eps * part.in_bounds
            width = sum(one.shape[1] for one in whole)
            rounding += math.sqrt(width) * part.multiplier / DEVIATION
            yield float(moved.max()) * part.in_bounds / self.reach, rounding / self.reach


def _row_norms(places: Sequence[Tensor]) -> Tensor:
    """Return L2 norms of rows that are in several places (rows, ...), float64 (rows,)."""
    norms = [torch.linalg.vector_norm(one, dim=1, dtype=torch.float64) for one in places]
    return torch.stack(norms).norm(dim=0)


def step_length_of(federation: Federation, client: int) -> float | None:
    """Return the length of a step of the common grid, in a_k C_k; None without noisy sums.

    a_k C_k is by how much one unit of the client moves a sum: here sum and charge meet.

    Args:
        federation: assembled, with plans.
        client: a client with a part of the sums.
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
    """Return the noise that the server adds to a sum of zeros, integers in float64 (size,).

    Args:
        federation: with central trust.
        size: number of values.
        seed: of the noise's stream; None: noise from the operating system.
        number: the round.
    """
    zeros = {"values": np.zeros(size, dtype=np.int64)}
    drawn = add_noise(zeros, ServerNoise(seed).source(number))["values"]
    return torch.from_numpy(drawn).to(federation.model.device, torch.float64)


def factor_of_charge(federation: Federation, client: int) -> float:
    """Return the noise that a client's charge counts on, over what the settings allow it; >= 1.

    Above 1, the plan counts on more honest clients than the smallest sum has.

    Args:
        federation: assembled, with plans.
        client: the client.
    """
    part = (federation.plan.clients or ())[client].part
    if part is None:
        return 1.0
    return max(1.0, part.noise_factor / math.sqrt(honest_draws(federation.experiment)))


def honest_draws(experiment: Experiment) -> int:
    """Return the fewest honest draws of noise in what an observer of sums or models sees.

    It comes from the settings, not from the plans that charge for it.
    """
    privacy, secure = experiment.privacy, experiment.secure_aggregation
    if privacy is None or secure is None or privacy.trust.name != "distributed":
        return 1
    return secure.min_clients - privacy.trust.colluding_clients
