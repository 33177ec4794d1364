"""The noise that a client is charged for, group by group."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedsim.accountant import Gaussian, JointGaussian
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.parameters import FlatParameters


@dataclass(frozen=True)
class ChargedNoise:
    """The noise that one client is charged for.

    Attributes:
        multipliers: charged σ_m / C_m of each group.
        bounds: C_m of each group.
        places: slices of each group in a flat release.
        expected_lot: L, by which sums are divided.
    """

    multipliers: tuple[float, ...]
    bounds: tuple[float, ...]
    places: tuple[list[slice], ...]
    expected_lot: float

    @classmethod
    def of(cls, step: DpSgdMechanism, parameters: FlatParameters) -> Self:
        """Return the noise of a step, from its charged event and not from how noise is added.

        Args:
            step: the client's mechanism, bound to the model.
            parameters: of the model.
        """
        groups = step.groups(parameters)
        places = tuple(parameters.slices(members) for members in groups.members)
        return cls(charged_multipliers(step), groups.bounds, places, step.expected_lot)

    def scaled(self, released: Tensor, group: int) -> Tensor:
        """Return a group's noise in charged standard deviations, float64.

        Args:
            released: one release without examples (size,).
            group: m.
        """
        unit = self.expected_lot / (self.multipliers[group] * self.bounds[group])
        return torch.cat([released[place] for place in self.places[group]]).double() * unit


def charged_multipliers(step: DpSgdMechanism) -> tuple[float, ...]:
    """Return the charged noise multipliers of a step; with adaptive clipping, the count's is last.

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
