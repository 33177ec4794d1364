"""Couplings that appear late, or in large batches only, are found by `PrivacyEngine`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.clients import PrivacyEngine
from fedsim.clients.model_checks.safety import UnsafeModelError

BATCH = 48
X, Y = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(0)), torch.arange(BATCH) % 2


class Centred(nn.Module):
    """Subtracts the mean of a large batch."""

    def __init__(self, *, in_training_only: bool = False, more_than: int = 0) -> None:
        super().__init__()
        self._always, self._more_than = not in_training_only, more_than

    def forward(self, x: Tensor) -> Tensor:
        couples = len(x) > self._more_than and (self._always or self.training)
        return x - x.mean(0) if couples else x


class Statistics(nn.Module):
    """Keeps the mean of a batch, after some calls or of large batches."""

    def __init__(self, after: int = 0, more_than: int = 0) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))
        self._calls, self._after, self._more_than = 0, after, more_than

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        if self._calls > self._after and len(x) > self._more_than:
            self.mean = x.detach().mean(0)
        return x


def start(first: nn.Module) -> tuple[Any, Any, PrivacyEngine]:
    model = nn.Sequential(first, nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(model, batch_size=BATCH, sample_size=BATCH, noise_multiplier=1.0)
    return model, optimizer, engine.attach(optimizer)


def step(model: Any, optimizer: Any, engine: PrivacyEngine) -> None:
    engine.backward(nn.functional.cross_entropy(model(X), Y, reduction="none"))
    optimizer.step()


@pytest.mark.parametrize("in_training_only", [False, True])
@pytest.mark.parametrize("more_than", [5, BATCH - 1])
@pytest.mark.parametrize("seed", [0, 1, 8, 38])  # but for 1, no small input passes the ReLU
def test_a_model_that_mixes_large_batches_is_refused(
    in_training_only: bool, more_than: int, seed: int
) -> None:
    torch.manual_seed(seed)
    parts = start(Centred(in_training_only=in_training_only, more_than=more_than))
    with pytest.raises(UnsafeModelError, match=r"other examples; compute|in the other rows, so"):
        step(*parts)
    assert not len(parts[2].ledger)


@pytest.mark.parametrize("after", [0, 60])
def test_buffers_are_compared_after_every_step(after: int) -> None:
    first = Statistics(after=after, more_than=0 if after else BATCH - 1)
    parts = start(first)

    def train() -> None:
        for _ in range(80):
            step(*parts)

    with pytest.raises(UnsafeModelError, match=r"buffer '0\.mean' .*(changes|changed)"):
        train()
    with pytest.raises(UnsafeModelError, match=r"buffer '0\.mean' has changed"):
        step(*parts)


def test_a_module_swapped_in_later_is_checked() -> None:
    model, optimizer, engine = start(nn.Identity())
    step(model, optimizer, engine)
    model[0] = Centred()
    with pytest.raises(UnsafeModelError, match="coupled to example"):
        step(model, optimizer, engine)
    model[0] = nn.Identity()
    step(model, optimizer, engine)
    handle = model[1].register_forward_hook(lambda module, args, output: output - output.mean(0))
    with pytest.raises(UnsafeModelError, match="coupled to example"):
        step(model, optimizer, engine)
    handle.remove()
    step(model, optimizer, engine)
    assert engine.steps == 3


def test_a_buffer_that_is_made_later_is_refused() -> None:
    class Late(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 200:
                self.register_buffer("mean", x.detach().mean(0))
            return x

    first = Late()
    model, optimizer, engine = start(first)
    step(model, optimizer, engine)
    first.calls = 200
    with pytest.raises(UnsafeModelError, match=r"buffer '0\.mean' has changed"):
        step(model, optimizer, engine)
