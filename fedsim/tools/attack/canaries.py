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
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedsim.accountant.groups import group_noise_multiplier
from fedsim.clients.clipping.clipping import Clipping, Groups, PatternClipping
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism

CANARY_SCALE = 1e4  # a canary's gradient, in clipping bounds


class CanaryModel(nn.Module):
    """A model whose input is the index of an example, with one canary parameter per example.

    Each pattern of parameters that `clipping` clips together has canary parameters of its own.
    `steepness` (n,) is the gradient of each example's loss in its canary, 0 without a canary term.
    `spares` are canary parameters without an example, whose coordinates show only noise.
    """

    def __init__(
        self, model: nn.Module, examples: Tensor, steepness: Tensor, spares: int, clipping: Clipping
    ) -> None:
        super().__init__()
        self.model = model
        rows = len(examples) + spares
        groups = len(clipping.patterns) if isinstance(clipping, PatternClipping) else 1
        self.canaries = nn.ModuleList(nn.Embedding(rows, 1) for _ in range(groups))
        for parameter in self.canaries.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("examples", examples, persistent=False)
        self.register_buffer("steepness", steepness, persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        """Return outputs (n, outputs + 1) for indices (n,); the last one is the canary term."""
        outputs = self.model(self.get_buffer("examples")[index]).flatten(1)
        steepness = self.get_buffer("steepness")[index].unsqueeze(1)
        first, *others = self.canaries
        canaries = sum((embedding(index) for embedding in others), first(index))
        return torch.cat([outputs, steepness * canaries], dim=1)


class CanaryView:
    """The positions of the first `most` canaries in a flat release, and how to read their values.

    `places` has a slice for each parameter group with canaries; `groups`, the last, are these.
    """

    def __init__(self, step: DpSgdMechanism, parameters: FlatParameters, most: int) -> None:
        canaries = parameters.slices(_canaries(parameters))
        num_groups = len(step.groups(parameters).bounds)
        self.places = [slice(one.start, min(one.stop, one.start + most)) for one in canaries]
        self.groups = slice(num_groups - len(canaries), num_groups)

    def charged_noise(self, step: DpSgdMechanism) -> float:
        """Return the charged noise multiplier σ / C of a canary's sum over all parameter groups."""
        return group_noise_multiplier(step.charged_multipliers[self.groups])

    def read(self, values: Tensor, step: DpSgdMechanism, bounds: Sequence[float]) -> Tensor:
        """Return the value of each observed canary, summed over groups, as float64 (coordinates,).

        `bounds` are the clip norms of the groups with canaries; `values` are in units of the first.
        """
        total, multipliers = self.charged_noise(step), step.charged_multipliers[self.groups]
        parts = [
            values[place].double() * ((total / z) ** 2 * bounds[0] / bound)
            for place, bound, z in zip(self.places, bounds, multipliers, strict=True)
        ]
        return torch.stack(parts).sum(0)


def with_canaries(step: DpSgdMechanism, parameters: FlatParameters) -> DpSgdMechanism:
    """Return the mechanism bound to a `CanaryModel`, with a canary in each of the model's groups.

    If the groups are no patterns, the only canary is a further layer of the model.
    """
    groups = step.bound_groups
    if groups is None or not isinstance(step.clipping, PatternClipping):
        return replace(step, bound_groups=None).for_model(parameters)
    pairs = zip(groups.members, _canaries(parameters), strict=True)
    members = tuple((*group, canary) for group, canary in pairs)
    sizes = tuple(sum(parameters.sizes[index] for index in group) for group in members)
    return replace(step, bound_groups=Groups(members, groups.bounds, sizes))


def _canaries(parameters: FlatParameters) -> list[int]:
    """Return the indices of the canary parameters, which follow those of the model."""
    return [i for i, name in enumerate(parameters.names) if name.startswith("canaries.")]
