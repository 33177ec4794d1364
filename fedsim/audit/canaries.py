"""Dirac canaries: a gradient in a direction of its own for each example.

The experiment's model, data and loss do not change. Each example i has one more parameter w_i and
adds scale · w_i to its loss. The gradient in w_i is far above the clipping bound, so the clipped
gradient is almost the canary alone. This is the worst case for the example's privacy: coordinate i
of an update shows, up to noise, whether example i was in the lot.
(Nasr et al. 2023, arXiv:2302.07956.)
"""

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.per_example.interface import PerExampleLoss

_CANARY_SCALE = 1e4  # a canary's gradient, in clipping bounds


class CanaryModel(nn.Module):
    """A model whose input is the index of an example, with a canary parameter per example.

    Args:
        model: the experiment's model.
        examples: a client's examples (n, ...), looked up by index.
        has_canary: 1 for an example with a canary, otherwise 0 (n,).
        bound: the clipping bound, which a canary's gradient exceeds by far.
        spares: more canary parameters, of no example: their coordinates show noise alone.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Tensor,
        has_canary: Tensor,
        bound: float,
        *,
        spares: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.canaries = nn.Embedding(len(examples) + spares, 1)
        nn.init.zeros_(self.canaries.weight)
        self.register_buffer("examples", examples, persistent=False)
        self.register_buffer("steepness", _CANARY_SCALE * bound * has_canary, persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        """Return the flat outputs (n, outputs + 1) for indices (n,); the canary comes last."""
        outputs = self.model(self.get_buffer("examples")[index]).flatten(1)
        steepness = self.get_buffer("steepness")[index].unsqueeze(1)
        return torch.cat([outputs, steepness * self.canaries(index)], dim=1)


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
