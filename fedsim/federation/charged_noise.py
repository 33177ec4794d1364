"""The noise that a client is charged for, group by group."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedsim.accountant import Gaussian, JointGaussian
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.updates.mechanism import UpdateMechanism
from fedsim.experiment import Experiment
from fedsim.federation.federation import Federation
from fedsim.federation.noise_shares import sum_scale
from fedsim.server.aggregation.noisy_sum import ServerNoise, add_noise


@dataclass(frozen=True)
class ChargedNoise:
    """The noise that one client is charged for.

    Attributes:
        multipliers: charged σ_m / C_m of each group; of correlated noise, that of the fresh noise.
        bounds: C_m of each group.
        places: slices of each group in a flat release.
        in_bounds: of each group, what a value of 1 in a release is in clipping bounds of the sum:
            L / C_m, or of integers the length of a step of the grid over a_k C_k.
    """

    multipliers: tuple[float, ...]
    bounds: tuple[float, ...]
    places: tuple[list[slice], ...]
    in_bounds: tuple[float, ...]

    @classmethod
    def of(
        cls,
        step: DpSgdMechanism,
        parameters: FlatParameters,
        *,
        step_length: float | None = None,
        factor: float = 1.0,
    ) -> Self:
        """Return the noise of a step, from its charged event and not from how noise is added.

        Args:
            step: the client's mechanism, bound to the model.
            parameters: of the model.
            step_length: of a release that is integers of one grid, the length of a step in a_k C_k
                (`step_length_of`); None: releases are divided by the expected lot.
            factor: noise that the charge counts on, over that of the step's event.
        """
        groups = step.groups(parameters)
        places = tuple(parameters.slices(members) for members in groups.members)
        # Correlated noise is charged with how far an example moves all releases about its lot.
        norm = 1.0 if step.correlation is None else step.correlation.column_norm
        multipliers = tuple(factor * norm * each for each in charged_multipliers(step))
        if step_length is None:
            in_bounds = tuple(step.expected_lot / bound for bound in groups.bounds)
        else:
            in_bounds = (step_length,) * len(groups.bounds)
        return cls(multipliers, groups.bounds, places, in_bounds)

    def squares(self, released: Tensor, group: int) -> tuple[float, int]:
        """Return the sum of squares of a group's noise, in charged deviations, and the count.

        Args:
            released: one release without examples (size,).
            group: m.
        """
        unit = self._unit(group)
        norms = [_norm(released[place]) * unit for place in self.places[group]]
        count = sum(place.stop - place.start for place in self.places[group])
        return sum(norm**2 for norm in norms), count

    def start(self, released: Tensor, count: int) -> Tensor:
        """Return the first noise values of a release, in charged deviations, float64.

        Args:
            released: one release without examples (size,).
            count: most values, of the first parameter.
        """
        place = self.places[0][0]
        stop = min(place.stop, place.start + count)
        return released[place.start : stop].double().cpu() * self._unit(0)

    def contribution(
        self, with_sums: Tensor, noise: Tensor, group: int, *, lot: int
    ) -> "Contribution":
        """Return what one of `lot` equal examples adds to a group.

        Args:
            with_sums: a release (size,).
            noise: the release with the same noise and without gradients (size,).
            group: m.
            lot: number of examples in the lot.
        """
        unit = self.in_bounds[group] / max(1, lot)
        moved, rounding = [0.0], [0.0]
        eps = torch.finfo(with_sums.dtype).eps
        for place in self.places[group]:
            moved.append(_norm(with_sums[place] - noise[place]))
            # Each coordinate of the two releases is rounded to their type.
            rounding.append(4.0 * eps * (_norm(with_sums[place]) + moved[-1]))
        return Contribution(math.hypot(*moved) * unit, math.hypot(*rounding) * unit)

    def _unit(self, group: int) -> float:
        return self.in_bounds[group] / self.multipliers[group]


def step_length_of(federation: Federation, client: int) -> float | None:
    """Return the length of a step of the common grid, in a_k C_k; None without noisy sums.

    a_k C_k is by how much one unit of the client moves a sum: here sum and charge meet.

    Args:
        federation: assembled, with plans.
        client: a client with a part of the sums.
    """
    plans, terms, sums = federation.plans, federation.client_privacy, federation.sums
    if plans is None or terms is None or sums is None:
        return None
    plan, rate = plans[client], federation.experiment.local.optimizer.lr
    scale = sum_scale(terms[client], plan, federation.weights.values[client], rate)
    adapts = plan.release.adapted_clip_norm is not None
    return abs(sums.unit) * (terms[client].privacy.clip_norm if adapts else 1.0) / scale


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
    return torch.from_numpy(drawn).to(federation.device, torch.float64)


def factor_of_charge(federation: Federation, client: int) -> float:
    """Return the noise that a client's charge counts on, over what the settings allow it; >= 1.

    Above 1, the plan counts on more honest clients than the smallest sum has.

    Args:
        federation: assembled, with plans.
        client: the client.
    """
    part = (federation.plans or ())[client].part
    if part is None:
        return 1.0
    return max(1.0, part.noise_factor / math.sqrt(honest_draws(federation.experiment)))


def honest_draws(experiment: Experiment) -> int:
    """Return the fewest honest draws of noise in what an observer of sums or models sees.

    It comes from the settings, not from the plans that charge for it.
    """
    privacy, secure = experiment.privacy, experiment.secure_aggregation
    if privacy is None or secure is None or privacy.trust != "distributed":
        return 1
    return secure.min_clients - privacy.colluders


def _norm(values: Tensor) -> float:
    """Return the L2 norm, accumulated in float64."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


@dataclass(frozen=True)
class Contribution:
    """What one example adds to a group of a sum.

    Attributes:
        norm: L2 norm, in clipping bounds C_m.
        rounding: largest error of the norm, in clipping bounds.
    """

    norm: float
    rounding: float


def charged_multipliers(step: DpSgdMechanism | UpdateMechanism) -> tuple[float, ...]:
    """Return the charged noise multipliers of a release; with adaptive clipping, the count's last.

    Raises:
        TypeError: the charged event is not Gaussian noise.
    """
    match step.mechanism:
        case Gaussian(noise_multiplier):
            return (noise_multiplier,)
        case JointGaussian(noise_multipliers):
            return tuple(noise_multipliers)
        case event:
            raise TypeError(f"no noise is known for {event!r}")
