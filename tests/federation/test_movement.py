"""The check that training moves every trained parameter."""

import pytest
import torch
from torch import nn

from fedsim.federation.first_checks import still_parameters, still_warnings
from fedsim.models.adapters import add_adapters, train_only
from fedsim.models.catalog import ModelError
from fedsim.models.settings import LoraSettings


class Net(nn.Module):
    def __init__(self, *, dead: str = "") -> None:
        super().__init__()
        self.first, self.second, self.extra = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.dead = dead
        if dead == "zeros":
            nn.init.zeros_(self.extra.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.dead == "detached":
            h = h.detach()
        out = self.second(h)
        return out if self.dead == "unused" else out + self.extra(h)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def still(model: nn.Module, *, lr: float = 0.1):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    before = [value.clone() for value in model.parameters()]
    try:
        return still_parameters(model, loss, x, torch.arange(8) % 3, lr=lr)
    finally:
        assert all(map(torch.equal, before, model.parameters()))
        assert model.training


def test_a_model_that_learns_has_no_warning() -> None:
    assert still(Net()) == ()


@pytest.mark.parametrize(
    ("dead", "names", "fix"),
    [
        ("unused", ["extra.weight", "extra.bias"], "use it in forward"),
        ("detached", ["first.weight", "first.bias"], "use it in forward, without detach"),
    ],
)
def test_parameters_that_learn_nothing_are_named_with_the_fix(dead, names, fix) -> None:
    found = still(Net(dead=dead))
    assert [one.name for one in found] == names
    assert len(still_warnings(found)) == 1
    assert fix in still_warnings(found)[0]


def test_a_low_rank_start_is_alive_and_two_zero_factors_are_dead() -> None:
    model = Net()
    train_only(model, [])
    model = add_adapters(model, LoraSettings(rank=2, targets=["first"]))
    assert still(model) == ()
    train_only(model, ["*down*", "*up*", "second.*"])
    nn.init.zeros_(model.get_parameter("first.down.weight"))
    found = still(model)
    assert [one.name for one in found] == ["first.down.weight", "first.up.weight"]
    assert "both factors" in found[0].reason


def test_a_step_below_the_precision_is_found_and_nothing_that_moves_is_refused() -> None:
    with pytest.raises(ModelError, match=r"moves no parameter .* and 1 more .*; a step with .* lr"):
        still(Net(), lr=1e-12)
