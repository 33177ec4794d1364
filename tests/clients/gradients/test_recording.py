"""A pass: which uses are recorded, when, and for which call."""

import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.gradients.layers.base import ExampleUse, Operand
from fedsim.clients.gradients.layers.linear import LinearUse
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import UncoveredParameterError
from fedsim.clients.gradients.recording import Recording, RuledModel


def net() -> RuledModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    return RuledModel(model, FlatParameters(model))


def start(ruled: RuledModel, rows: int = 5) -> Recording:
    return ruled.start(ruled.parameters.data.unsqueeze(0), torch.ones(rows))


def example_gradients(uses: list[ExampleUse], parameters: FlatParameters, n: int) -> Tensor:
    rows = torch.zeros(n, parameters.size).double()
    for use in uses:
        for index in use.parameters:
            rows[:, parameters.slices([index])[0]] += use.per_example(index).flatten(1)
    return rows


def plain(model: nn.Module, x: Tensor) -> Tensor:
    rows = [
        torch.autograd.grad(model(row.unsqueeze(0)).square().sum(), list(model.parameters()))
        for row in x
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


X1, X2 = (
    torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2)
)


def run(ruled: RuledModel, recording: Recording, x: Tensor) -> Tensor:
    with ruled.in_place(recording):
        return ruled.model(x).square().sum()


def test_the_model_runs_unchanged_and_weights_get_no_gradient() -> None:
    ruled = net()
    expected = ruled.model(X1)
    recording = start(ruled)
    with ruled.in_place(recording):
        outputs = ruled.model(X1)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    outputs.square().sum().backward()
    assert all(p.grad is None for p in ruled.model.parameters())
    found = example_gradients(recording.uses, ruled.parameters, 5)
    torch.testing.assert_close(found, plain(ruled.model, X1))


def test_inputs_get_their_gradient() -> None:
    ruled = net()
    x, expected = X1.clone().requires_grad_(), X1.clone().requires_grad_()
    run(ruled, start(ruled), x).backward()
    ruled.model(expected).square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


@pytest.mark.parametrize("first", [0, 1])
def test_forwards_before_backwards_of_two_passes(first: int) -> None:
    ruled = net()
    passes = [start(ruled), start(ruled)]
    losses = [run(ruled, own, x) for own, x in zip(passes, (X1, X2), strict=True)]
    ruled.fill(passes[first], losses[first], None)
    assert not passes[1 - first].uses
    for at in (first, 1 - first):
        if at != first:
            ruled.fill(passes[at], losses[at], None)
        found = example_gradients(passes[at].uses, ruled.parameters, 5)
        torch.testing.assert_close(found, plain(ruled.model, (X1, X2)[at]))


def test_of_two_forwards_in_one_pass_only_those_of_the_loss_count() -> None:
    ruled = net()
    recording = start(ruled)
    with ruled.in_place(recording):
        loss = ruled.model(X1).square().sum()
        ruled.model(X2)
        with torch.no_grad():
            ruled.model(X2)
    ruled.fill(recording, loss, None)
    assert len(recording.uses) == 2
    found = example_gradients(recording.uses, ruled.parameters, 5)
    torch.testing.assert_close(found, plain(ruled.model, X1))


def test_a_retained_graph_records_each_backward() -> None:
    ruled = net()
    recording = start(ruled)
    loss = run(ruled, recording, X1)
    loss.backward(retain_graph=True)
    once = example_gradients(recording.uses, ruled.parameters, 5)
    loss.backward()
    assert len(recording.uses) == 4
    assert len({id(use) for use in recording.uses}) == 2, "the same uses, twice"
    again = example_gradients(recording.uses[2:], ruled.parameters, 5)
    torch.testing.assert_close(again, once)


def test_a_second_backward_without_the_graph_is_refused() -> None:
    ruled = net()
    recording = start(ruled)
    loss = run(ruled, recording, X1)
    ruled.fill(recording, loss, None)
    with pytest.raises(RuntimeError, match="second time"):
        ruled.fill(recording, loss, None)


def test_backwards_inside_the_pass_are_not_recorded() -> None:
    ruled = net()
    recording = start(ruled)
    with ruled.in_place(recording):
        x = X1.clone().requires_grad_()
        (slope,) = torch.autograd.grad(ruled.model(x).sum(), x)
        loss = ruled.model(X1 + slope.detach()).square().sum()
    assert not recording.uses
    ruled.fill(recording, loss, None)
    assert len(recording.uses) == 2


def test_second_derivatives_are_refused() -> None:
    ruled = net()
    recording = start(ruled)
    with ruled.in_place(recording):
        x = X1.clone().requires_grad_()
        loss = ruled.model(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|once_differentiable"):
        slope.square().sum().backward()


@pytest.mark.parametrize("rows", [1, 4, 10])
def test_inputs_with_another_number_of_rows_are_not_covered(rows: int) -> None:
    ruled = net()
    with pytest.raises(UncoveredParameterError, match="for 5 examples") as caught:
        run(ruled, start(ruled), torch.randn(rows, 3).double())
    assert caught.value.indices == (0, 1)
    assert all("forward" not in vars(module) for module in ruled.model.modules())


def test_a_loss_without_parameters_has_no_uses() -> None:
    ruled = net()
    recording = start(ruled)
    with ruled.in_place(recording):
        loss = X1.sum()
    assert ruled.fill(recording, loss, None, tuple(ruled.model.parameters())) == (None,) * 4
    assert not recording.uses


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.layer = nn.Parameter(torch.randn(3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert self.w.shape == (3,)
        assert self.w.requires_grad
        with torch.no_grad():
            x = x / self.w.norm()
        return self.layer(x * self.w)


def test_a_bare_parameter_is_not_covered_and_is_named() -> None:
    torch.manual_seed(0)
    model = Bare().double()
    ruled = RuledModel(model, FlatParameters(model))
    assert ruled.uncovered == (0,)
    recording = start(ruled)
    loss = run(ruled, recording, X1)
    with pytest.raises(UncoveredParameterError, match="how w is used") as caught:
        ruled.fill(recording, loss, None)
    assert caught.value.indices == (0,)


def test_only_a_bias_keeps_no_input() -> None:
    ruled = net()
    bias = Operand(torch.ones(1, 2).double(), 0)
    use = LinearUse(Operand(torch.ones(1, 2, 3).double(), None), bias)
    recording = start(ruled)
    recording.record(use, torch.randn(5, 3).double().requires_grad_()).sum().backward()
    assert use.input.numel() == 0
    assert recording.uses == [use]


def test_frozen_parameters_are_run_and_have_no_use() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    ruled = RuledModel(model, FlatParameters(model))
    recording = start(ruled)
    loss = run(ruled, recording, X1)
    torch.testing.assert_close(loss, model(X1).square().sum())
    ruled.fill(recording, loss, None)
    assert [use.parameters for use in recording.uses] == [[0, 1]]


def test_a_models_own_forward_comes_back_even_after_a_failure() -> None:
    ruled = net()
    model = ruled.model
    assert isinstance(model, nn.Sequential)
    own = model[2].forward
    model[2].forward = own
    ruled = RuledModel(model, FlatParameters(model))
    with pytest.raises(ZeroDivisionError), ruled.in_place(start(ruled)):
        raise ZeroDivisionError
    assert "forward" not in vars(model[0])
    assert vars(model[2])["forward"] is own


def test_models_stay_plain() -> None:
    """Nothing is left on the model: it can be pickled, and its state has the same names."""
    ruled = net()
    recording = start(ruled)
    ruled.fill(recording, run(ruled, recording, X1), None)
    again = pickle.loads(pickle.dumps(ruled.model))
    assert list(again.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert not any(vars(p) for p in ruled.model.parameters())


def test_nothing_outlives_the_step() -> None:
    """A use must not hold the history of its input, which holds the use: no collector sees that."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    ruled = RuledModel(model, FlatParameters(model))
    recording = start(ruled)
    loss = run(ruled, recording, X1)
    ruled.fill(recording, loss, None)
    assert len(recording.uses) == 2
    watched = [weakref.ref(use) for use in recording.uses]
    del recording, loss
    gc.collect()
    assert [seen() for seen in watched] == [None, None]
