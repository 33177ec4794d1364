"""In an attached model too, an example adds the same bits whatever else is in its batch.

A matrix library rounds a row by the shape of the product. At the kink of a ReLU the last bit
decides about a whole gradient, so that one example could move the contributions of all others.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedsim.clients import PrivacyEngine

BATCH, SIZE = 40, 784


class Wrapped(nn.Module):
    """A model that autograd runs, not the engine by hand."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, 128, bias=False), nn.ReLU(), nn.Linear(128, 1, bias=False))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 8, 5, 2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1152, 3, bias=False),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "wrapped": lambda: Wrapped(perceptron()),
    "convolution": convolution,
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_number_of_other_examples_changes_no_bit(kind: str) -> None:
    """The others are rows of zeros, which have no gradient, so a batch's sum is one contribution.

    A batch of one padded batch is added up in float32, a longer one in float64.
    """
    torch.manual_seed(0)
    model, x = MODELS[kind](), torch.randn(1, SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine(
        model,
        batch_size=BATCH,
        sample_size=200,
        noise_multiplier=0.0,
        max_grad_norm=1e3,
        batches="poisson",
    )

    def contribution(others: int) -> Tensor:
        engine.backward(model(torch.cat([x, torch.zeros(others, SIZE)])).sum(1))
        optimizer.step()
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat(found)

    with engine.attach(optimizer):
        alone = contribution(0)
        assert alone.norm() > 0.1
        sizes = (1, 2, 3, 5, 8, 14, 15, 16, 31, 47, 55, 56, 70)
        found = {others: contribution(others) for others in sizes}
        rows = engine._model.padded_examples
        long = found[70]
        torch.testing.assert_close(long, alone)
        assert {others < rows for others in sizes} == {True, False}
        for others, one in found.items():
            assert torch.equal(one, alone if others < rows else long), others
