"""Convolutions of many channels, which torch's own runs for one client: the gradients are exact."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.gradients.layers.convolution import ConvolutionUse
from fedsim.clients.gradients.per_example import OneAtATime
from fedsim.clients.gradients.rule_gradients import RuleGradients

GEOMETRIES = [
    *((1, 1, 1, "same"), (1, 2, 2, 0)),
    *((2, 1, 1, 0), (2, 2, 1, 1), (2, 1, 2, "same"), (2, 2, 2, 0)),
    *((3, 1, 2, 1), (3, 2, 1, 0)),
]


def _losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(1), targets, reduction="none")


@pytest.mark.parametrize(("dimensions", "stride", "dilation", "padding"), GEOMETRIES)
@pytest.mark.parametrize("clients", [1, 2])
def test_gradients_are_those_of_each_example_alone(
    dimensions: int, stride: int, dilation: int, padding: Any, clients: int
) -> None:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    torch.manual_seed(0)
    second = kind(32, 33, 3, stride=stride, dilation=dilation, padding=padding)
    model = nn.Sequential(kind(2, 32, 2, padding=1), nn.ReLU(), second).double()
    x = torch.randn(4, 2, *[6] * dimensions, dtype=torch.float64)
    exact = OneAtATime(model, _losses)
    rules = RuleGradients(model, _losses, parameters=exact.parameters)
    y = torch.arange(4)
    values = exact.parameters.data.expand(clients, -1)
    found = rules.gradients(x, y, values)
    torch.testing.assert_close(found, exact.gradients(x, y), rtol=1e-10, atol=1e-13)


def test_one_client_runs_torchs_own_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConvolutionUse, "_add_taps", None)  # the way of several clients
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.Tanh(), nn.Conv2d(32, 2, 3), nn.Flatten())
    x, y = torch.randn(2, 1, 6, 6), torch.zeros(2, dtype=torch.int64)
    rules = RuleGradients(model, _losses)
    assert rules.gradients(x, y).isfinite().all()
