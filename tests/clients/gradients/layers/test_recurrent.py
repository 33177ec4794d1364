"""Recurrent layers step by step: outputs, states and gradients of torch's fused ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import OneAtATime, UncoveredParameterError
from fedsim.clients.gradients.recording import RuledModel
from fedsim.clients.gradients.rule_gradients import RuleGradients

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
}


def flattened(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in flattened(value)]


def by_rule(module: nn.Module, rows: int, *args: Any) -> list[Tensor]:
    parameters = FlatParameters(module)
    ruled = RuledModel(module, parameters)
    recording = ruled.start(parameters.data.unsqueeze(0), torch.ones(rows))
    with ruled.in_place(recording):
        return flattened(module(*args))


@pytest.mark.parametrize(
    ("bias", "bidirectional", "batch_first"),
    [(True, False, True), (False, True, True), (True, True, False)],
)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_return_what_torchs_return(
    name: str, bias: bool, bidirectional: bool, batch_first: bool
) -> None:
    torch.manual_seed(0)
    options = {"bias": bias, "bidirectional": bidirectional, "batch_first": batch_first}
    layer = LAYERS[name](3, 4, num_layers=2, **options).double()
    x = torch.randn(5, 6, 3).double() if batch_first else torch.randn(6, 5, 3).double()
    state = torch.randn(4 if bidirectional else 2, 5, 4).double()
    given: Any = (state, state.flip(0)) if name == "lstm" else state
    for args in ((x,), (x, given)):
        expected = flattened(layer(*args))
        for one, other in zip(by_rule(layer, 5, *args), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_cells_return_what_torchs_return(name: str, bias: bool) -> None:
    torch.manual_seed(0)
    cell = CELLS[name](3, 4, bias=bias).double()
    x, state = torch.randn(5, 3).double(), torch.randn(5, 4).double()
    given: Any = (state, state.flip(0)) if name == "lstm" else state
    for args in ((x,), (x, given)):
        expected = flattened(cell(*args))
        for one, other in zip(by_rule(cell, 5, *args), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


class Sequences(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if not self.layer.batch_first:
            x = x.transpose(0, 1)
        output, state = self.layer(x)
        last = state[0] if isinstance(state, tuple) else state
        output = output if self.layer.batch_first else output.transpose(0, 1)
        return output.flatten(1) * last.transpose(0, 1).flatten(1).mean(1, keepdim=True)


class Steps(nn.Module):
    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] * state[1] if isinstance(state, tuple) else state  # type: ignore[return-value]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().mean(1) + outputs.sum(1)


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{f"{name} cell": lambda name=name: Steps(CELLS[name](3, 4)) for name in CELLS},
    **{name: lambda name=name: Sequences(LAYERS[name](3, 4)) for name in LAYERS},
    "two directions": lambda: Sequences(
        nn.LSTM(3, 2, num_layers=2, bidirectional=True, batch_first=True)
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_clients_are_those_of_one_example_at_a_time(name: str) -> None:
    clients = 3
    torch.manual_seed(0)
    model = MODULES[name]().double()
    x = torch.randn(3 * clients, 4, 3).double()
    exact = OneAtATime(model, loss)
    data = exact.parameters.data
    fast = RuleGradients(model, loss, parameters=exact.parameters)
    values = data + 0.1 * torch.randn(clients, len(data)).double()
    found = fast.gradients(x, torch.zeros(len(x)), values)
    for k in range(clients):
        data.copy_(values[k])
        own = slice(3 * k, 3 * k + 3)
        expected = exact.gradients(x[own], torch.zeros(3))
        torch.testing.assert_close(found[own], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.LSTM(3, 4, proj_size=2), (6, 5, 3)), (nn.GRU(3, 4), (5, 3)), (nn.GRUCell(3, 4), (3,))],
)
def test_projections_and_single_examples_have_no_rule(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    with pytest.raises(UncoveredParameterError, match="no rule covers this use"):
        by_rule(layer, 5, torch.randn(*shape))
