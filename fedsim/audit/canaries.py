"""A model whose every example carries a canary: a gradient in a direction that is its own.

The experiment's model, data and loss stay as they are. Beside them, each example i has one more
parameter w_i and adds scale · w_i to its loss. Its gradient there is so large that clipping leaves
almost nothing but the canary, whatever the model's own gradient is: of all examples the one that an
attacker would plant. Who sees an update reads off coordinate i whether example i was in the lot.
(Dirac canaries: Nasr et al. 2023, arXiv:2302.07956.)
"""

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleLoss

_STEEP = 1e4  # a canary's gradient over the clipping bound


class CanaryModel(nn.Module):
    """A model over indices of examples, with a canary for each.

    Args:
        model: the experiment's.
        examples: a client's examples (n, ...), looked up by index.
        planted: 1 where the example carries its canary, 0 where it does not (n,).
        bound: the clipping bound that gradients are to exceed.
    """

    def __init__(self, model: nn.Module, examples: Tensor, planted: Tensor, bound: float) -> None:
        super().__init__()
        self.model = model
        self.canaries = nn.Embedding(len(examples), 1)
        nn.init.zeros_(self.canaries.weight)
        self.register_buffer("examples", examples, persistent=False)
        self.register_buffer("steepness", _STEEP * bound * planted, persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        """Return the model's outputs of some examples (n, ...), each with its canary as last."""
        outputs = self.model(self.get_buffer("examples")[index]).flatten(1)
        steepness = self.get_buffer("steepness")[index].unsqueeze(1)
        return torch.cat([outputs, steepness * self.canaries(index)], dim=1)


def with_canary(loss: PerExampleLoss, shape: torch.Size) -> PerExampleLoss:
    """Return a loss for outputs of a `CanaryModel`: the experiment's, plus the canary.

    Args:
        loss: the experiment's, one value per example.
        shape: of the model's output for one example.
    """

    def both(outputs: Tensor, targets: Tensor) -> Tensor:
        own = outputs[:, :-1].reshape(len(outputs), *shape)
        return loss(own, targets) + outputs[:, -1]

    return both
