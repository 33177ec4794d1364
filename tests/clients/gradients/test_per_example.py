"""Every way gives the gradients, norms and clipped sums of one example at a time."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsim.clients.clipping.clipping import Clipping, FlatClipping, Groups
from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.layers.base import LayerUse
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import (
    BatchStatistics,
    OneAtATime,
    PaddedBatch,
    PerExampleGradients,
    PerExampleLoss,
    UncoveredParameterError,
)
from fedsim.clients.gradients.rule_gradients import RuleGradients

Way = Callable[[nn.Module, PerExampleLoss], PerExampleGradients]
AddClippedSum = Callable[..., BatchStatistics]
Added = Callable[[PerExampleGradients, Tensor, Tensor, Clipping], tuple[Tensor, BatchStatistics]]


def by_rules(model: nn.Module, loss: PerExampleLoss) -> PerExampleGradients:
    return RuleGradients(model, loss)


def by_torch_func(model: nn.Module, loss: PerExampleLoss) -> PerExampleGradients:
    return RuleGradients(model, loss, units=[""])


WAYS: list[Way] = [by_rules, by_torch_func, OneAtATime]
FAST: list[Way] = [by_rules, by_torch_func]
EXAMPLES = 5


@dataclass
class PerParameter(Clipping):
    """Clips each parameter alone and remembers the norms that it was given."""

    bound: float
    norms: list[Tensor] = field(default_factory=list)

    def groups(self, parameters: FlatParameters) -> Groups:
        count = len(parameters.tensors)
        members = tuple((i,) for i in range(count))
        return Groups(members, (self.bound,) * count, parameters.sizes)

    def clip_factors(self, norms: Tensor, bounds: Tensor) -> Tensor:
        self.norms.append(norms)
        return FlatClipping(self.bound).clip_factors(norms, bounds)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).mean(1) - targets) ** 2 + outputs.flatten(1).square().mean(1)


def score(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.flatten(1).sum(1)


@pytest.fixture(scope="session")
def added(add_clipped_sum: AddClippedSum) -> Added:
    """The sum of clipped gradients, in the model's type, and what happened to the examples."""

    def add(
        gradients: PerExampleGradients, x: Tensor, y: Tensor, clipping: Clipping
    ) -> tuple[Tensor, BatchStatistics]:
        into = torch.zeros_like(gradients.parameters.data, dtype=torch.float64)
        groups = clipping.groups(gradients.parameters)
        statistics = add_clipped_sum(gradients, x, y, clipping, groups, into)
        return into.to(gradients.parameters.data.dtype), statistics

    return add


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Positions(nn.Module):
    """Bare parameters: a shift and a scale for each place and channel, a token in front."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, length + 1, width))
        self.scale = nn.Parameter(torch.randn(width))
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.second = nn.Parameter(torch.randn(width))
        self.shift = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1)
        x = self.scale * (self.place + x) + self.second.repeat(len(x), 1, 1)
        x += self.shift
        return x.mul(self.second)


class TiedWords(nn.Module):
    """A table tied to the output layer, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.table(x))))


class Cell(nn.Module):
    """A recurrent cell written by hand, reused over time."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            state = torch.tanh(self.input(x[:, t]) + self.hidden(state))
        return state


class Twice(nn.Module):
    """One layer used twice, a weight shared by layers with biases of their own, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(6, 3)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(torch.tanh(self.conv(x)))) + self.norm(x)
        return self.frozen(self.two(torch.tanh(self.one(x))))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.layer(x)
        last = state[0] if isinstance(state, tuple) else state
        return output.flatten(1) * last.transpose(0, 1).flatten(1).mean(1, keepdim=True)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LSTMCell(3, 4), nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(len(x), 4), x.new_zeros(len(x), 4))
        second = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            state = self.one(x[:, t], state)
            second = self.two(state[0], second)
        return second


class PatchGradient(nn.Module):
    """Takes a gradient of its own inside forward: that backward pass is not the loss's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.layer(probe)).sum(), probe)
        return self.out(slope) + self.layer(x).sum(1, keepdim=True)


class Looks(nn.Module):
    """Looks at shapes and values of parameters, runs without gradients in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert self.layer.weight.shape == (4, 3)
        assert self.layer.weight.dtype == x.dtype
        with torch.no_grad():
            size = self.layer(x).abs().mean(1, keepdim=True) + self.layer.weight.norm()
        return self.layer(x) / size + self.layer.weight.detach().sum()


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(EXAMPLES, *shape)


def words() -> Tensor:
    return torch.randint(0, 7, (EXAMPLES, 6))


def frozen_statistics() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    norm.running_mean = torch.randn(3)
    norm.running_var = torch.rand(3) + 0.5
    return norm


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
CASES: dict[str, Case] = {
    "linear 3-D": (lambda: nn.Linear(4, 3), numbers(6, 4)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)),
        numbers(4),
    ),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, dilation=2, padding=1), numbers(2, 9)),
    "conv2d groups": (
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2),
        numbers(4, 6, 5),
    ),
    "conv2d same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same"), numbers(2, 5, 6)),
    "conv2d valid": (lambda: nn.Conv2d(2, 3, 2, padding="valid", bias=False), numbers(2, 5, 6)),
    "conv2d circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        numbers(2, 5, 6),
    ),
    "conv2d reflect same": (
        lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"),
        numbers(2, 5, 6),
    ),
    "conv2d depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3), numbers(3, 5, 5)),
    "conv2d one channel": (lambda: nn.Conv2d(1, 8, 4, stride=2, padding=2), numbers(1, 12, 12)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, stride=2, padding=1, dilation=2), numbers(2, 5, 5, 5)),
    "conv stack": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3),
            nn.Flatten(),
            nn.Linear(16, 2),
        ),
        numbers(1, 4, 4),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 2)),
        words,
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.LayerNorm(6, bias=False)),
        numbers(4),
    ),
    "layer norm of two dimensions": (lambda: nn.LayerNorm([3, 4]), numbers(2, 3, 4)),
    "rms norm": (lambda: nn.RMSNorm(6), numbers(3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), numbers(4, 3, 2)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), numbers(4, 3, 2)),
    "frozen batch norm": (lambda: nn.Sequential(frozen_statistics()).eval(), numbers(3, 4, 4)),
    "prelu": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3), nn.Linear(3, 3), nn.PReLU()),
        numbers(4),
    ),
    "positions": (lambda: Positions(3, 4), numbers(3, 4)),
    "tied words": (TiedWords, words),
    "cell over time": (Cell, numbers(4, 3)),
    "twice": (Twice, numbers(2, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM(3, 4, batch_first=True)), numbers(5, 3)),
    "lstm deep": (
        lambda: Recurrent(nn.LSTM(3, 2, num_layers=2, bidirectional=True, batch_first=True)),
        numbers(4, 3),
    ),
    "gru": (lambda: Recurrent(nn.GRU(3, 4, bias=False, batch_first=True)), numbers(5, 3)),
    "rnn": (lambda: Recurrent(nn.RNN(3, 4, nonlinearity="relu", batch_first=True)), numbers(5, 3)),
    "cells": (Cells, numbers(3, 3)),
    "own backward": (PatchGradient, numbers(3)),
    "looks": (Looks, numbers(3)),
}
UNITS = {  # what no rule covers and runs through torch.func; else, the whole model is by rules
    "conv2d groups": [""],
    "conv2d circular": [""],
    "conv2d reflect same": [""],
    "conv2d depthwise": [""],
    "positions": [""],
}
BY_TORCH_FUNC = (  # torch has no right batching rule for tables and fused recurrent layers
    *("linear 3-D", "mlp", "conv2d circular", "conv2d depthwise", "conv3d", "conv stack"),
    *("layer norm", "group norm", "prelu", "positions", "cell over time", "twice", "looks"),
)


IN_FLOAT32 = (
    *("linear 3-D", "mlp", "conv1d", "conv stack", "embedding", "layer norm", "group norm"),
    *("prelu", "positions", "tied words", "twice", "lstm", "cells"),
)
ONE_OF_A_KIND = (
    *("linear 3-D", "conv1d", "conv2d groups", "conv3d", "embedding", "layer norm", "rms norm"),
    *("group norm", "instance norm", "prelu", "positions", "tied words", "lstm deep", "cells"),
)


def case(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    make, data = CASES[name]
    model, x = make().to(dtype), data()
    for parameter in model.parameters():
        if parameter.ndim < 2:  # norms start with ones and zeros
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model, x.to(dtype) if x.is_floating_point() else x, torch.randn(EXAMPLES, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    [
        *((name, "rules", torch.float64) for name in CASES),
        *((name, "rules", torch.float32) for name in IN_FLOAT32),
        *((name, "torch.func", torch.float64) for name in BY_TORCH_FUNC),
    ],
)
def test_every_way_equals_one_example_at_a_time(
    name: str, way: str, dtype: torch.dtype, added: Added
) -> None:
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    model, x, y = case(name, dtype)
    exact = OneAtATime(model, squared)
    units = [""] if way == "torch.func" else UNITS.get(name, [])
    fast = RuleGradients(model, squared, parameters=exact.parameters, units=units)

    expected = exact.gradients(x, y)
    found = fast.gradients(x, y)
    assert (found - expected).norm(dim=1).le(tolerance * expected.norm(dim=1)).all()

    clip = 0.5 * expected.norm(dim=1).median().item()
    for clipping in (FlatClipping(clip), FlatClipping(float("inf"))):
        sums = [added(each, x, y, clipping) for each in (exact, fast)]
        bound = tolerance * expected.norm(dim=1).clamp(max=clipping.max_grad_norm).sum()
        assert (sums[0][0] - sums[1][0]).norm() <= bound
        assert sums[0][1] == sums[1][1]

    by_parameter = [PerParameter(clip), PerParameter(clip)]
    sums = [
        added(each, x, y, clipping)
        for each, clipping in zip((exact, fast), by_parameter, strict=True)
    ]
    norms = torch.cat(by_parameter[0].norms), torch.cat(by_parameter[1].norms)
    # Parameters whose gradients cancel (a bias before a norm) are noise of the size of the terms.
    slack = tolerance * norms[0].norm(dim=1, keepdim=True)
    assert ((norms[0] - norms[1]).abs() <= tolerance * norms[0] + slack).all()
    assert (sums[0][0] - sums[1][0]).norm() <= 10 * tolerance * clip * EXAMPLES


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_every_kind_of_layer_runs_by_rules_as_chosen(name: str) -> None:
    model, x, y = case(name, torch.float64)
    gradients = gradients_for(model, squared, x, y, rules_only=True)
    assert isinstance(gradients, RuleGradients)
    assert list(gradients.units) == UNITS.get(name, [])


@pytest.mark.parametrize("name", CASES)
def test_clients_in_one_tile_get_the_gradients_of_each_alone(name: str) -> None:
    """With parameters of their own; the rows of a padded batch are those of client after client."""
    model, x, y = case(name, torch.float64)
    clients = 3
    exact = OneAtATime(model, squared)
    data = exact.parameters.data
    fast = RuleGradients(model, squared, parameters=exact.parameters, units=UNITS.get(name, []))
    values = data + 0.2 * torch.randn(clients, len(data), dtype=data.dtype)
    padded = (torch.cat([x] * clients), torch.cat([y + k for k in range(clients)]))
    try:
        found = fast.gradients(*padded, values).unflatten(0, (clients, EXAMPLES))
    except RuntimeError:
        assert name in ONE_CLIENT, "a model that is not for several clients fails, and is noticed"
        return
    if name in ONE_CLIENT:
        pytest.skip("reads its parameters itself; the choice keeps it to one client a padded batch")
    for k in range(clients):
        data.copy_(values[k])
        expected = exact.gradients(x, y + k)
        assert (found[k] - expected).norm() <= 1e-10 * expected.norm()


ONE_CLIENT = {"own backward", "looks"}


@pytest.mark.parametrize("name", ["tied words", "twice"])
def test_gradients_are_those_of_plain_autograd(name: str, added: Added) -> None:
    model, x, y = case(name, torch.float64)
    plain = copy.deepcopy(model)
    gradients = RuleGradients(model, squared, units=UNITS.get(name, []))
    total, _ = added(gradients, x, y, FlatClipping(float("inf")))
    squared(plain(x), y).sum().backward()
    for parameter, view in zip(
        (p for p in plain.parameters() if p.requires_grad),
        gradients.parameters.views(total),
        strict=True,
    ):
        expected = torch.zeros_like(view) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(view, expected, rtol=1e-9, atol=1e-11)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_train_and_eval_mode(training: bool, added: Added) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    model.train(training)
    x, y = torch.randn(4, 6).double(), torch.randn(4).double()
    gradients = RuleGradients(model, squared)
    torch.manual_seed(7)
    total, _ = added(gradients, x, y, FlatClipping(float("inf")))
    torch.manual_seed(7)
    loss = squared(model(x), y).sum()
    expected = torch.autograd.grad(loss, gradients.parameters.tensors)
    torch.testing.assert_close(total, torch.cat([g.flatten() for g in expected]))
    assert model.training is training


@pytest.mark.parametrize("trained", [1, 2, 4, 8, 6, 9])
def test_any_part_may_be_frozen(trained: int) -> None:
    """One or two of four parameters: what is frozen is not laid out and not stored."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    for k, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(bool(trained >> k & 1))
    x, y = torch.randn(4, 2, 6).double(), torch.randn(4).double()
    exact = OneAtATime(model, squared)
    fast = RuleGradients(model, squared, parameters=exact.parameters)
    torch.testing.assert_close(fast.gradients(x, y), exact.gradients(x, y), rtol=1e-10, atol=1e-12)
    padded = PaddedBatch(1, x, y, torch.ones(4).double())
    for use in fast.record(exact.parameters.data.unsqueeze(0), padded):
        assert isinstance(use, LayerUse)
        assert use.weight_index is not None or use.input.numel() == 0


@pytest.mark.parametrize("way", WAYS)
def test_nothing_and_no_gradient_add_nothing(way: Way, added: Added) -> None:
    gradients = way(nn.Linear(3, 1), score)
    total, statistics = added(gradients, torch.empty(0, 3), torch.empty(0), FlatClipping(1.0))
    assert not total.any()
    assert statistics == BatchStatistics(0, 0, (0,))
    total, statistics = added(gradients, torch.zeros(2, 3), torch.zeros(2), FlatClipping(9.0))
    assert not total[:3].any()
    assert statistics == BatchStatistics(2, 0, (2,))


POISONS = [float("nan"), -float("inf"), 3e38]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *product(["mlp", "linear 3-D", "conv stack", "positions", "layer norm"], [by_rules]),
        *product(["cell over time", "twice"], WAYS),
    ],
)
def test_an_example_without_a_finite_gradient_adds_nothing_and_is_counted(
    name: str, way: Way, poison: float, added: Added
) -> None:
    model, x, y = case(name, torch.float32)
    if way is by_rules:
        gradients: PerExampleGradients = RuleGradients(model, squared, units=UNITS.get(name, []))
    else:
        gradients = way(model, squared)
    keep = torch.tensor([0, 2, 3, 4])
    clean, _ = added(gradients, x[keep], y[keep], FlatClipping(0.7))
    for where in ("features", "targets"):
        dirty_x, dirty_y = x.clone(), y.clone()
        if where == "targets":
            dirty_y[1] = poison
        else:
            dirty_x[1].view(-1)[0] = poison
        if where == "features" and poison == 3e38:
            continue  # a layer norm or a tanh makes a finite gradient of it
        dirty, statistics = added(gradients, dirty_x, dirty_y, FlatClipping(0.7))
        assert statistics.not_finite == 1
        assert statistics.examples == EXAMPLES
        assert statistics.within[0] <= 4
        torch.testing.assert_close(dirty, clean, rtol=1e-5, atol=1e-6)


def test_an_example_that_is_not_finite_in_one_group_adds_nothing_in_any(added: Added) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x[:, :1]) + self.two(x[:, 1:])

    for way in WAYS:
        total, statistics = added(
            way(Two(), score),
            torch.tensor([[1.0, float("nan")], [2.0, 3.0]]),
            torch.zeros(2),
            PerParameter(10.0),
        )
        assert total.tolist() == pytest.approx([2.0, 3.0])
        assert statistics == BatchStatistics(2, 1, (1, 1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_sizes_that_float32_can_hardly_hold(way: Way, size: float, added: Added) -> None:
    """The norm of a gradient may be far outside of what float32 can square."""
    model = nn.Linear(3, 2, bias=False)
    x = torch.tensor([[1.0, -2.0, 0.5], [1e-3, 0.0, 1e-3]]) * size
    total, statistics = added(way(model, score), x, torch.zeros(2), FlatClipping(1.0))
    assert statistics.not_finite == 0
    assert torch.isfinite(total).all()
    norms = x.double().norm(dim=1) * 2**0.5
    expected = (x.double() / norms.clamp(min=1.0).unsqueeze(1)).sum(0).repeat(2)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_norm_that_float32_cannot_hold_is_clipped(way: Way, added: Added) -> None:
    def steep(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.squeeze(1) * 1e25

    x = torch.tensor([[1e20, 1e20], [1e-25, 0.0]])
    gradients = way(nn.Linear(2, 1, bias=False), steep)
    total, statistics = added(gradients, x, torch.zeros(2), FlatClipping(2.0))
    assert statistics.not_finite == (1 if way is not by_rules else 0), "the gradients overflow"
    moved = 2.0 * math.sqrt(0.5) if way is by_rules else 0.0
    expected = torch.tensor([1.0 + moved, moved])
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)


sizes = st.sampled_from([0.0, 1e-30, 1e-20, 1e-8, 1e-3, 1.0, 1e3, 1e10, 1e20, 1e30])
entry = st.builds(lambda value, size: value * size, st.floats(-1, 1, width=32), sizes)
poisoned = st.one_of(entry, st.sampled_from([float("nan"), float("inf"), -float("inf")]))


@pytest.mark.parametrize(
    ("way", "grouped"),
    [(by_rules, False), (by_rules, True), (by_torch_func, False), (OneAtATime, True)],
)
@settings(max_examples=30, deadline=None)
@given(st.data(), st.floats(1e-3, 1e3), st.integers(1, 4), st.integers(1, 4))
def test_removing_an_example_changes_the_sum_by_at_most_the_bound(
    added: Added, way: Way, grouped: bool, data: st.DataObject, bound: float, n: int, length: int
) -> None:
    """For vectors and sequences with values of any size, NaN, infinity and cancellation."""
    rows = data.draw(
        st.lists(
            st.lists(poisoned, min_size=2 * length, max_size=2 * length), min_size=n, max_size=n
        )
    )
    x = torch.tensor(rows, dtype=torch.float32).view(n, length, 2)
    if data.draw(st.booleans()) and length > 1:
        x[0, 1:] = -x[0, :1]  # terms of one example cancel in part or all
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1.0, 1.5, parameter.numel()).view_as(parameter) + k)
    clipping = PerParameter(bound) if grouped else FlatClipping(bound)
    gradients = way(model, score)
    y = torch.zeros(n)
    parts = [slice(0, 8)] if not grouped else [slice(0, 4), slice(4, 6), slice(6, 8)]
    first, _ = added(gradients, x[:1], y[:1], clipping)
    whole, _ = added(gradients, x, y, clipping)
    rest, _ = added(gradients, x[1:], y[1:], clipping)
    assert torch.isfinite(whole).all()
    for part in parts:
        assert first[part].double().norm() <= bound * (1 + 1e-5)
        change = (whole[part].double() - rest[part].double()).norm()
        assert change <= bound * (1 + 1e-5 * n)


def test_two_forwards_before_one_backward_keep_their_own_records(added: Added) -> None:
    """The loss calls the model again: each call has a record of its own, in any order."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.model(x), self.model(2 * x)
            with torch.no_grad():
                self.model(3 * x)
            self.model(4 * x)  # leads to no loss
            return second * 2 - first

    x, y = torch.randn(4, 3).double(), torch.randn(4).double()
    exact = OneAtATime(Double(), squared)
    fast = RuleGradients(exact.model, squared, parameters=exact.parameters)
    torch.testing.assert_close(fast.gradients(x, y), exact.gradients(x, y), rtol=1e-10, atol=1e-12)
    sums = [added(each, x, y, FlatClipping(0.3))[0] for each in (exact, fast)]
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-9, atol=1e-12)


class BareProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(3, 2)), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x @ self.w)


def test_a_use_without_a_rule_is_named_and_adds_nothing(add_clipped_sum: AddClippedSum) -> None:
    gradients = RuleGradients(BareProduct(), score)
    into = torch.zeros_like(gradients.parameters.data, dtype=torch.float64)
    clipping = FlatClipping(1.0)
    groups = clipping.groups(gradients.parameters)
    with pytest.raises(UncoveredParameterError, match="how w is used"):
        add_clipped_sum(gradients, torch.randn(3, 3), torch.zeros(3), clipping, groups, into)
    assert not into.any()


def test_a_loss_with_a_penalty_on_weights_is_found() -> None:
    model = nn.Linear(3, 1)

    def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.squeeze(1) + model.weight.square().sum()

    with pytest.raises(UncoveredParameterError, match="weight"):
        RuleGradients(model, penalised).gradients(torch.randn(3, 3), torch.zeros(3))


def test_batch_normalisation_over_the_batch_has_no_rule() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).train()
    with pytest.raises(UncoveredParameterError, match="this use of a BatchNorm1d layer"):
        RuleGradients(model, score).gradients(torch.randn(3, 3), torch.zeros(3))


@pytest.mark.parametrize("bound", [1e-7, 1e-9, 2.5e-15, 1e-18])
@pytest.mark.parametrize("way", WAYS)
def test_factors_that_float32_can_hardly_hold_are_not_rounded_up(
    way: Way, bound: float, added: Added
) -> None:
    x = torch.tensor([[1e30, 0.0]])
    gradients = way(nn.Linear(2, 1, bias=False), score)
    total, _ = added(gradients, x, torch.zeros(1), FlatClipping(bound))
    assert total.double().norm() <= bound * (1 + 1e-6)


def test_scripted_layers_are_found() -> None:
    """TorchScript runs outside our sight; what it uses must not silently go missing."""
    scripted = torch.jit.trace(nn.Linear(3, 1), torch.randn(2, 3))
    assert isinstance(scripted, nn.Module)
    model = nn.Sequential(nn.Linear(3, 3), scripted)
    with pytest.raises(UncoveredParameterError, match=r"1\.weight"):
        RuleGradients(model, score).gradients(torch.randn(3, 3), torch.zeros(3))


def test_statistics_add_up() -> None:
    assert BatchStatistics(3, 1, (2, 0)) + BatchStatistics(2, 0, (1, 1)) == BatchStatistics(
        5, 1, (3, 1)
    )


class LargestTensor(TorchDispatchMode):
    """Sees every tensor that an operation makes, in forward and backward."""

    size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor):
                self.size_bytes = max(self.size_bytes, value.numel() * value.element_size())
        return output


def test_a_wide_layer_never_holds_weights_for_each_example(add_clipped_sum: AddClippedSum) -> None:
    """64 x (400 x 400) would be 41 MB; no tensor is larger than inputs and activations."""
    model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
    gradients, clipping = RuleGradients(model, score), FlatClipping(1.0)
    into = torch.zeros_like(gradients.parameters.data, dtype=torch.float64)
    groups = clipping.groups(gradients.parameters)
    for shape in ((400,), (3, 400), (40, 400)):
        x = torch.randn(64, *shape)
        with LargestTensor() as largest:
            add_clipped_sum(gradients, x, torch.zeros(64), clipping, groups, into)
        assert 1e5 < largest.size_bytes <= 8.5e6, shape


class Words(nn.Module):
    """A large table, tied to the output layer."""

    def __init__(self, poisoned: int | None = None) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.out.weight, self.poisoned = self.table.weight, poisoned

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.out(torch.tanh(self.table(x)))
        if self.poisoned is None:
            return outputs
        mark = (x[:, :1] == self.poisoned).unsqueeze(2)
        return outputs * torch.where(mark, torch.nan, 1.0)


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().flatten(1).mean(1)


def test_a_poisoned_example_is_dropped_from_uses_that_are_added(added: Added) -> None:
    torch.manual_seed(8)
    fast = RuleGradients(Words(poisoned=49), mean_square)
    x = torch.randint(0, 49, (4, 5))
    keep = [0, 1, 3]
    clean, _ = added(fast, x[keep], torch.zeros(3), FlatClipping(0.1))
    x[2, 0] = 49
    dirty, statistics = added(fast, x, torch.zeros(4), FlatClipping(0.1))
    assert statistics.not_finite == 1
    torch.testing.assert_close(dirty, clean)
