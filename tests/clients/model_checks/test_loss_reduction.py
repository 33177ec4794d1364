"""A mean, a sum and one value per example are told apart, and nothing else passes for one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.privacy_engine.row_losses import find_reduction

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(9) % 3


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("batch", [1, 9, 64, 301])
def test_a_reduction_is_found_at_any_size(reduction: str, batch: int) -> None:
    trained = model()
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    state = torch.get_rng_state()
    loss = nn.CrossEntropyLoss(reduction=reduction)
    assert find_reduction(trained, loss, X, Y, batch) == reduction
    assert find_reduction(trained, loss, X.double().float(), Y, batch) == reduction
    assert torch.equal(state, torch.get_rng_state())
    assert trained.training
    assert all(torch.equal(before[name], value) for name, value in trained.state_dict().items())


def of_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[::2], targets[::2])


def slightly_weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, torch.tensor([1.0, 1.1, 1.0]))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=2),
        slightly_weighted,
        of_pairs,
        lambda o, y: functional.cross_entropy(o, y, reduction="sum") / (len(o) + 1),
        lambda o, y: functional.cross_entropy(o, y) * (1 + (len(o) > 32)),
    ],
)
def test_anything_else_is_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(UnsafeModelError, match="neither the mean nor the sum"):
        find_reduction(model(), loss, X, Y, 64)


def test_examples_without_a_gradient_show_nothing() -> None:
    with pytest.raises(UnsafeModelError, match="have no gradient"):
        find_reduction(model(), lambda o, y: 0.0 * o.sum(), X, Y, 64)
