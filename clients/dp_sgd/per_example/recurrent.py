"""Recurrent layers step by step, so that their weights are linear uses repeated over time.

torch runs nn.LSTM, nn.GRU and nn.RNN as one fused operation, which has no batching rule for vmap.
Equations: those of torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.per_example.recorder import Recorder

Linear = Callable[[Recorder, Tensor, Tensor, Tensor | None], Tensor | None]
State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]


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


def _tanh_cell(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.tanh(x + h),)


def _relu_cell(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.relu(x + h),)


CELLS: dict[str, Cell] = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _tanh_cell,
    "rnn_relu": _relu_cell,
}


def layers_route(kind: str, linear: Linear) -> Callable[..., Any]:
    """Return the route of torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu."""

    def route(
        tape: Recorder,
        input: Tensor,
        state: Any,
        parameters: Any,
        has_biases: Any = True,
        num_layers: int = 1,
        dropout: float = 0.0,
        train: bool = False,
        bidirectional: bool = False,
        batch_first: bool = False,
    ) -> Any:
        each = 4 if has_biases is True else 2
        directions = 2 if bidirectional else 1
        # Packed sequences come with their sizes in place of the state; projections have more.
        if not isinstance(parameters, list | tuple) or isinstance(has_biases, list | tuple):
            return None
        if len(parameters) != each * num_layers * directions:
            return None
        rows = input if batch_first else input.transpose(0, 1)
        initial = tuple(state) if isinstance(state, list | tuple) else (state,)
        if len(rows) != tape.examples:
            return None
        weights = [parameters[k : k + each] for k in range(0, len(parameters), each)]
        ends: list[State] = []
        for layer in range(num_layers):
            if layer and train and dropout > 0:
                rows = functional.dropout(rows, dropout)
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                first = tuple(part[at] for part in initial)
                found = _over_time(
                    tape, CELLS[kind], linear, rows, first, weights[at], backwards=direction == 1
                )
                if found is None:
                    return None
                outputs.append(found[0])
                ends.append(found[1])
            rows = torch.cat(outputs, dim=2) if directions == 2 else outputs[0]
        final = [torch.stack(parts) for parts in zip(*ends, strict=True)]
        return (rows if batch_first else rows.transpose(0, 1), *final)

    return route


def cell_route(kind: str, linear: Linear) -> Callable[..., Any]:
    """Return the route of torch.lstm_cell, torch.gru_cell and the like."""

    def route(
        tape: Recorder,
        input: Tensor,
        state: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        first = tuple(state) if isinstance(state, list | tuple) else (state,)
        if input.ndim != 2 or len(input) != tape.examples:
            return None
        x, h = linear(tape, input, w_ih, b_ih), linear(tape, first[0], w_hh, b_hh)
        if x is None or h is None:
            return None
        after = CELLS[kind](x, h, first)
        return after if kind == "lstm" else after[0]

    return route


def _over_time(
    tape: Recorder,
    cell: Cell,
    linear: Linear,
    rows: Tensor,
    state: State,
    weights: Sequence[Tensor],
    *,
    backwards: bool,
) -> tuple[Tensor, State] | None:
    """Return one direction of one layer: outputs (n, t, hidden) and the state at the end."""
    w_ih, w_hh, b_ih, b_hh = weights if len(weights) == 4 else (*weights, None, None)
    inputs = linear(tape, rows, w_ih, b_ih)  # of all times at once
    if inputs is None:
        return None
    times = inputs.unbind(1)
    outputs = []
    for x in reversed(times) if backwards else times:
        h = linear(tape, state[0], w_hh, b_hh)
        if h is None:
            return None
        state = cell(x, h, state)
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs, dim=1), state
