"""Dirac canaries: a gradient in a direction of its own for each example.

The experiment's model, data and loss do not change. Each example i has one more parameter w_i and
adds scale · w_i to its loss. The gradient in w_i is far above the clipping bound, so the clipped
gradient is almost the canary alone. This is the worst case for the example's privacy: coordinate i
of an update shows, up to noise, whether example i was in the batch.
(Nasr et al. 2023, arXiv:2302.07956.)

Where groups of parameters are clipped by patterns, each group gets canaries of its own. The
attacker adds a coordinate's values in all groups, each weighed by 1 / z_m² and in its clipping
bound C_m: the sufficient statistic. A canary then adds 1, and the noise is that of all groups
together.
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
    """A model whose input is the index of an example, with a canary parameter per example.

    Args:
        model: the experiment's model.
        examples: a client's examples (n, ...), looked up by index.
        has_canary: 1 for an example with a canary, otherwise 0 (n,).
        bound: the clipping bound, which a canary's gradient exceeds by far.
        spares: more canary parameters, of no example: their coordinates show noise alone.
        groups: number of groups of parameters that have canaries.
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
        for own in (self.canaries, *others):
            nn.init.zeros_(own.weight)
        self.others = nn.ModuleList(others)
        self.register_buffer("examples", examples, persistent=False)
        self.register_buffer("steepness", _CANARY_SCALE * bound * has_canary, persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        """Return the flat outputs (n, outputs + 1) for indices (n,); the canary comes last."""
        outputs = self.model(self.get_buffer("examples")[index]).flatten(1)
        steepness = self.get_buffer("steepness")[index].unsqueeze(1)
        canaries = self.canaries(index)
        for own in self.others:
            canaries = canaries + own(index)
        return torch.cat([outputs, steepness * canaries], dim=1)


def add_canary_loss(loss: PerExampleLoss, shape: torch.Size) -> PerExampleLoss:
    """Return the loss of a `CanaryModel`: the experiment's loss plus the canary term.

    Args:
        loss: the experiment's loss, one value per example.
        shape: shape of the model's output for one example.
    """

    def loss_with_canary(outputs: Tensor, targets: Tensor) -> Tensor:
        own = outputs[:, :-1].reshape(len(outputs), *shape)
        return loss(own, targets) + outputs[:, -1]

    return loss_with_canary


@dataclass(frozen=True)
class CanaryView:
    """How the attacker reads the canaries' coordinates off a release.

    Attributes:
        places: slices of the observed coordinates of each group's canaries in a flat release.
        groups: the group of each of them.
    """

    places: tuple[slice, ...]
    groups: tuple[int, ...]

    @classmethod
    def of(cls, step: DpSgdMechanism, parameters: FlatParameters, most: int) -> Self:
        """Return the view of a mechanism that is bound to a `CanaryModel`.

        Args:
            step: the mechanism.
            parameters: of the model.
            most: most coordinates to observe.
        """
        members = step.groups(parameters).members
        found = [index for index, name in enumerate(parameters.names) if is_canary(name)]
        places = parameters.slices(found)
        return cls(
            tuple(slice(one.start, min(one.stop, one.start + most)) for one in places),
            tuple(next(m for m, group in enumerate(members) if i in group) for i in found),
        )

    @property
    def coordinates(self) -> int:
        """Number of observed coordinates."""
        return self.places[0].stop - self.places[0].start

    def charged_noise(self, step: DpSgdMechanism) -> float:
        """Return the charged σ / C on a coordinate, of all groups with canaries together."""
        return group_noise_multiplier(self._multipliers(step))

    def read(self, values: Tensor, step: DpSgdMechanism, bounds: Sequence[float]) -> Tensor:
        """Return a coordinate's values of all groups as one, float64 (coordinates,).

        Args:
            values: a release or an update (size,), in the unit of the first group's bound.
            step: the mechanism, for the weights 1 / z_m² of the groups.
            bounds: C_m of each group.
        """
        own = self._multipliers(step)
        total = group_noise_multiplier(own)
        first = bounds[self.groups[0]]
        parts = [
            values[place].double() * ((total / z) ** 2 * first / bounds[group])
            for place, group, z in zip(self.places, self.groups, own, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _multipliers(self, step: DpSgdMechanism) -> list[float]:
        charged = step.charged_multipliers
        return [charged[group] for group in self.groups]


def with_canaries(step: DpSgdMechanism, parameters: FlatParameters) -> DpSgdMechanism:
    """Return a mechanism for a `CanaryModel`: with groups by patterns, each has canaries.

    Args:
        step: the mechanism of the experiment's model.
        parameters: of the `CanaryModel`.

    Raises:
        ValueError: the clipping does not fit.
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
    """Return the number of groups that have canaries of their own."""
    return len(step.clipping.patterns) if isinstance(step.clipping, PatternClipping) else 1


def is_canary(name: str) -> bool:
    """Whether a parameter of a `CanaryModel` is one of canaries."""
    return name == "canaries.weight" or name.startswith("others.")
