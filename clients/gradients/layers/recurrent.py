"""Recurrent layers, run one time step after another; each time step calls linear layers.

torch runs nn.LSTM, nn.GRU and nn.RNN as one fused operation, which `vmap` does not support.
Equations: those of torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.gradients.layers.base import Recorder, Rule, optional_operand
from fedsim.clients.gradients.layers.linear import LinearUse

State = tuple[Tensor, ...]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # function of x, weight and bias


def _lstm_cell(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, dim=1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_cell(x: Tensor, h: Tensor, state: State) -> State:
    x_r, x_z, x_n = x.chunk(3, dim=1)
    h_r, h_z, h_n = h.chunk(3, dim=1)
    new = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    z = torch.sigmoid(x_z + h_z)
    return ((1 - z) * new + z * state[0],)


_CELLS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "LSTM": _lstm_cell,
    "GRU": _gru_cell,
    "RNN_TANH": lambda x, h, state: (torch.tanh(x + h),),
    "RNN_RELU": lambda x, h, state: (torch.relu(x + h),),
}


def run_layers(linear: Linear, module: nn.RNNBase, input: Tensor, state: Any = None) -> Any:
    """Return the output and final state of nn.LSTM, nn.GRU or nn.RNN on padded sequences.

    Args:
        linear: function of (x, weight, bias) that runs a linear layer.
        module: the recurrent layers, without projections.
        input: n sequences of t vectors (n, t, d), or (t, n, d) without `batch_first`.
        state: initial state, in the form that torch takes; None for zeros.
    """
    rows = input if module.batch_first else input.transpose(0, 1)
    directions = 2 if module.bidirectional else 1
    zeros = rows.new_zeros(module.num_layers * directions, len(rows), module.hidden_size)
    if state is None:
        state = (zeros, zeros) if module.mode == "LSTM" else zeros
    initial = state if isinstance(state, tuple) else (state,)
    ends: list[State] = []
    for layer in range(module.num_layers):
        if layer and module.dropout > 0:
            rows = functional.dropout(rows, module.dropout, module.training)
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            first = tuple(part[at] for part in initial)
            output, end = _over_time(linear, module, at, rows, first)
            outputs.append(output)
            ends.append(end)
        rows = torch.cat(outputs, dim=2) if directions == 2 else outputs[0]
    final = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    output = rows if module.batch_first else rows.transpose(0, 1)
    return output, final if module.mode == "LSTM" else final[0]


def _over_time(
    linear: Linear, module: nn.RNNBase, at: int, rows: Tensor, state: State
) -> tuple[Tensor, State]:
    """Return outputs (n, t, hidden) and final state of one direction of one recurrent layer."""
    backwards = module.bidirectional and at % 2 == 1
    w_ih, w_hh, *biases = module.all_weights[at]
    b_ih, b_hh = biases or (None, None)
    cell, times = _CELLS[module.mode], linear(rows, w_ih, b_ih).unbind(1)
    outputs = []
    for x in reversed(times) if backwards else times:
        state = cell(x, linear(state[0], w_hh, b_hh), state)
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs, dim=1), state


def run_cell(linear: Linear, module: nn.RNNCellBase, input: Tensor, state: Any = None) -> Any:
    """Return the next state of nn.LSTMCell, nn.GRUCell or nn.RNNCell.

    Args:
        linear: function of (x, weight, bias) that runs a linear layer.
        module: the recurrent cell.
        input: inputs (n, d).
        state: previous state, in the form that torch takes; None for zeros.
    """
    kind = type(module).__name__.removesuffix("Cell")
    kind = f"RNN_{module.nonlinearity.upper()}" if isinstance(module, nn.RNNCell) else kind
    if state is None:
        zeros = input.new_zeros(len(input), module.hidden_size)
        state = (zeros, zeros) if kind == "LSTM" else zeros
    before = state if isinstance(state, tuple) else (state,)
    x = linear(input, module.weight_ih, module.bias_ih)
    h = linear(before[0], module.weight_hh, module.bias_hh)
    after = _CELLS[kind](x, h, before)
    return after if kind == "LSTM" else after[0]


def recurrent_rule(run: Callable[..., Any]) -> Rule:
    """Return the layer rule of recurrent modules, which `run` computes by linear layers."""

    def rule(recorder: Recorder, module: Any, input: Any, state: Any = None) -> Any:
        layers = isinstance(module, nn.RNNBase)
        if not isinstance(input, Tensor) or input.ndim != (3 if layers else 2):
            return None
        if layers and module.proj_size:
            return None

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            use = LinearUse(recorder.operand(weight), optional_operand(recorder, bias))
            return recorder.record(use, x)

        return run(linear, module, input, state)

    return rule
