"""Dirac canaries: added parameters that give each example's gradient a separate direction.

The experiment's model, data and loss do not change. Each example i has one more parameter w_i and
adds scale · w_i to its loss. The gradient in w_i is far above the clipping bound, so the clipped
gradient is almost the canary alone. This is the worst case for the example's privacy: coordinate i
of an update shows, up to noise, whether example i was in the batch. (Nasr et al. 2023,
arXiv:2302.07956.)

If groups of parameters are clipped by patterns, each group m gets separate canaries. Let C_m be the
group's clip norm and z_m its noise multiplier. The adversary adds a coordinate's values of all
groups, in units of C_m and weighted by 1 / z_m². This sum is the sufficient statistic. A canary
then adds 1, with the joint noise of all groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from fedsim.accountant.groups import group_noise_multiplier
from fedsim.clients.clipping.clipping import Groups
from fedsim.clients.clipping.patterns import PatternClipping
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism

_CANARY_SCALE = 1e4  # a canary's gradient, in clipping bounds


class CanaryModel(nn.Module):
    """A model whose input is the index of an example, with one canary parameter per example.

    Args:
        model: the experiment's model.
        examples: a client's examples (n, ...), which inputs select by index.
        has_canary: 1 for an example with a canary, otherwise 0 (n,).
        bound: the clip norm, which a canary's gradient exceeds by far.
        spares: number of extra canary parameters without an example, whose coordinates show only
            noise.
        groups: number of parameter groups that have canaries.
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
        self.canaries = nn.Embedding(len(examples) + spares, 1)
        rows = len(examples) + spares
        others = [nn.Embedding(rows, 1) for _ in range(groups - 1)]
        for embedding in (self.canaries, *others):
            nn.init.zeros_(embedding.weight)
        self.others = nn.ModuleList(others)
        self.register_buffer("examples", examples, persistent=False)
        self.register_buffer("steepness", _CANARY_SCALE * bound * has_canary, persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        """Return outputs (n, outputs + 1) for indices (n,); the last one is the canary term."""
        outputs = self.model(self.get_buffer("examples")[index]).flatten(1)
        steepness = self.get_buffer("steepness")[index].unsqueeze(1)
        canaries = self.canaries(index)
        for embedding in self.others:
            canaries = canaries + embedding(index)
        return torch.cat([outputs, steepness * canaries], dim=1)


def add_canary_loss(loss: PerExampleLoss, shape: torch.Size) -> PerExampleLoss:
    """Return the loss of a `CanaryModel`: the experiment's loss plus the canary term.

    Args:
        loss: the experiment's loss, one value per example.
        shape: shape of the model's output for one example.
    """

    def loss_with_canary(outputs: Tensor, targets: Tensor) -> Tensor:
        predictions = outputs[:, :-1].reshape(len(outputs), *shape)
        return loss(predictions, targets) + outputs[:, -1]

    return loss_with_canary


@dataclass(frozen=True)
class CanaryView:
    """The positions of the canaries' coordinates in a release, as the adversary reads them.

    Attributes:
        places: slices of a flat release with the observed canary coordinates of each group.
        groups: index of the parameter group of each slice.
    """

    places: tuple[slice, ...]
    groups: tuple[int, ...]

    @classmethod
    def of(cls, step: DpSgdMechanism, parameters: FlatParameters, most: int) -> Self:
        """Return the positions of the canaries in the releases of a `CanaryModel`.

        Args:
            step: the mechanism, bound to the model.
            parameters: parameters of the `CanaryModel`.
            most: maximum number of coordinates to observe.
        """
        members = step.groups(parameters).members
        indices = [index for index, name in enumerate(parameters.names) if is_canary(name)]
        places = parameters.slices(indices)
        return cls(
            tuple(slice(place.start, min(place.stop, place.start + most)) for place in places),
            tuple(next(m for m, group in enumerate(members) if i in group) for i in indices),
        )

    @property
    def coordinates(self) -> int:
        """Number of observed coordinates."""
        return self.places[0].stop - self.places[0].start

    def charged_noise(self, step: DpSgdMechanism) -> float:
        """Return the charged noise multiplier σ / C of a coordinate, for all groups together."""
        return group_noise_multiplier(self._multipliers(step))

    def read(self, values: Tensor, step: DpSgdMechanism, bounds: Sequence[float]) -> Tensor:
        """Return one value per coordinate, combined over all groups, float64 (coordinates,).

        Args:
            values: a release or an update (size,), in units of the first group's clip norm.
            step: the mechanism, which gives the weights 1 / z_m² of the groups.
            bounds: clip norm C_m of each group.
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
        charged = step.charged_multipliers
        return [charged[group] for group in self.groups]


def with_canaries(step: DpSgdMechanism, parameters: FlatParameters) -> DpSgdMechanism:
    """Return the mechanism bound to a `CanaryModel`, with a canary in each group of parameters.

    Args:
        step: the mechanism of the experiment's model.
        parameters: parameters of the `CanaryModel`.

    Raises:
        ValueError: the clipping does not fit the parameters.
    """
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
    return name == "canaries.weight" or name.startswith("others.")
