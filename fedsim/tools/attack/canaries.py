"""Dirac canaries: extra parameters of a model that give each example its own gradient direction.

For each example i there is one more parameter w_i (its canary), and scale · w_i is added to the
loss of example i. The gradient in w_i is far above the clipping bound, so the clipped gradient is
almost only this coordinate. This is the worst case for the example's privacy: the coordinate in an
update shows, up to noise, whether example i was in the batch (Nasr et al. 2023, arXiv:2302.07956).

If groups of parameters are clipped separately, each example has one canary in each group m with
clip norm C_m and noise multiplier z_m. The adversary sums the example's coordinates in units of C_m
and with weights proportional to 1 / z_m², which is the sufficient statistic. A canary then adds 1,
and the noise is the joint noise of all groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from fedsim.accountant.groups import group_noise_multiplier
from fedsim.clients.clipping.clipping import Groups, PatternClipping
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism

CANARY_SCALE = 1e4  # a canary's gradient, in clipping bounds


class CanaryModel(nn.Module):
    """A model whose input is the index of an example, with one canary parameter per example.

    Examples with `has_canary` 1 (not 0) have the canary term in their loss. `spares` are canary
    parameters without an example, whose coordinates show only noise.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Tensor,
        has_canary: Tensor,
        bound: float,
        *,
        spares: int = 0,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        rows = len(examples) + spares
        self.canaries = nn.ModuleList(nn.Embedding(rows, 1) for _ in range(groups))
        for parameter in self.canaries.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("examples", examples, persistent=False)
        self.register_buffer("steepness", CANARY_SCALE * bound * has_canary, persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        """Return outputs (n, outputs + 1) for indices (n,); the last one is the canary term."""
        outputs = self.model(self.get_buffer("examples")[index]).flatten(1)
        steepness = self.get_buffer("steepness")[index].unsqueeze(1)
        first, *others = self.canaries
        canaries = sum((embedding(index) for embedding in others), first(index))
        return torch.cat([outputs, steepness * canaries], dim=1)


@dataclass(frozen=True)
class CanaryView:
    """The positions of the canary parameters in a flat release, and how to read their values."""

    places: tuple[slice, ...]  # of the observed coordinates, for each parameter group with canaries
    groups: tuple[int, ...]  # for each slice, the index of its parameter group

    @classmethod
    def of(cls, step: DpSgdMechanism, parameters: FlatParameters, most: int) -> Self:
        """Find the places of the first `most` canaries in a release, one flat vector."""
        members = step.groups(parameters).members
        indices = [index for index, name in enumerate(parameters.names) if is_canary(name)]
        places = parameters.slices(indices)
        return cls(
            tuple(slice(place.start, min(place.stop, place.start + most)) for place in places),
            tuple(next(m for m, group in enumerate(members) if i in group) for i in indices),
        )

    def charged_noise(self, step: DpSgdMechanism) -> float:
        """Return the charged noise multiplier σ / C of a canary's sum over all parameter groups."""
        return group_noise_multiplier(self._multipliers(step))

    def read(self, values: Tensor, step: DpSgdMechanism, bounds: Sequence[float]) -> Tensor:
        """Return the value of each observed canary, summed over groups, as float64 (coordinates,).

        `values` are in units of the first group's clip norm; `bounds` are the groups' clip norms.
        """
        multipliers = self._multipliers(step)
        total = group_noise_multiplier(multipliers)
        first = bounds[self.groups[0]]
        parts = [
            values[place].double() * ((total / z) ** 2 * first / bounds[group])
            for place, group, z in zip(self.places, self.groups, multipliers, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _multipliers(self, step: DpSgdMechanism) -> list[float]:
        return [step.charged_multipliers[group] for group in self.groups]


def with_canaries(step: DpSgdMechanism, parameters: FlatParameters) -> DpSgdMechanism:
    """Return the mechanism bound to a `CanaryModel`, with a canary in each group of parameters."""
    clipping, groups = step.clipping, step.bound_groups
    if not isinstance(clipping, PatternClipping) or groups is None:
        return replace(step, bound_groups=None).for_model(parameters)
    canaries = [index for index, name in enumerate(parameters.names) if is_canary(name)]
    of_model = [index for index in range(len(parameters.names)) if index not in canaries]
    members = tuple(
        (*(of_model[index] for index in group), canary)
        for group, canary in zip(groups.members, canaries, strict=True)
    )
    sizes = tuple(sum(parameters.sizes[i] for i in group) for group in members)
    return replace(step, bound_groups=Groups(members, groups.bounds, sizes))


def num_groups(step: DpSgdMechanism) -> int:
    """Return the number of parameter groups that have canaries."""
    return len(step.clipping.patterns) if isinstance(step.clipping, PatternClipping) else 1


def is_canary(name: str) -> bool:
    """Return whether a parameter of a `CanaryModel` is a canary parameter."""
    return name.startswith("canaries.")
