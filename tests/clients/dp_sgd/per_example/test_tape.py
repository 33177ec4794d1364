"""The tape: which uses are noted, when, and for which call."""

import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.layers import LinearUse, Use
from fedsim.clients.dp_sgd.per_example.tape import Tape


def net() -> tuple[nn.Module, FlatParameters]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    return model, FlatParameters(model)


def example_gradients(uses: list[Use], parameters: FlatParameters, n: int) -> Tensor:
    rows = torch.zeros(n, parameters.size).double()
    for use in uses:
        for index, values in use.per_example().items():
            rows[:, parameters.slices([index])[0]] += values.flatten(1)
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


def test_the_model_runs_unchanged_and_weights_get_no_gradient() -> None:
    model, parameters = net()
    expected = model(X1)
    tape = Tape(parameters.index, 5)
    with tape:
        outputs = model(X1)
    assert torch.equal(outputs, expected)
    outputs.square().sum().backward()
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(example_gradients(tape.uses, parameters, 5), plain(model, X1))


def test_inputs_get_their_gradient() -> None:
    model, parameters = net()
    x, expected = X1.clone().requires_grad_(), X1.clone().requires_grad_()
    with Tape(parameters.index, 5):
        outputs = model(x)
    outputs.square().sum().backward()
    model(expected).square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


@pytest.mark.parametrize("first", [0, 1])
def test_forwards_before_backwards_on_two_tapes(first: int) -> None:
    model, parameters = net()
    tapes, losses = [], []
    for x in (X1, X2):
        tape = Tape(parameters.index, 5)
        with tape:
            losses.append(model(x).square().sum())
        tapes.append(tape)
    tapes[first].backward(losses[first])
    assert not tapes[1 - first].uses
    torch.testing.assert_close(
        example_gradients(tapes[first].uses, parameters, 5), plain(model, (X1, X2)[first])
    )
    tapes[1 - first].backward(losses[1 - first])
    torch.testing.assert_close(
        example_gradients(tapes[1 - first].uses, parameters, 5), plain(model, (X1, X2)[1 - first])
    )


def test_two_forwards_on_one_tape_only_those_of_the_loss_count() -> None:
    model, parameters = net()
    tape = Tape(parameters.index, 5)
    with tape:
        loss = model(X1).square().sum()
        model(X2)
        with torch.no_grad():
            model(X2)
    tape.backward(loss)
    assert len(tape.uses) == 2
    torch.testing.assert_close(example_gradients(tape.uses, parameters, 5), plain(model, X1))


def test_a_retained_graph_notes_each_backward() -> None:
    model, parameters = net()
    tape = Tape(parameters.index, 5)
    with tape:
        loss = model(X1).square().sum()
    tape.backward(loss, retain_graph=True)
    once = example_gradients(tape.uses, parameters, 5)
    tape.backward(loss)
    assert len(tape.uses) == 4
    assert len({id(use) for use in tape.uses}) == 2, "the same uses, noted twice"
    torch.testing.assert_close(example_gradients(tape.uses[2:], parameters, 5), once)


def test_a_second_backward_without_the_graph_is_refused() -> None:
    model, parameters = net()
    tape = Tape(parameters.index, 5)
    with tape:
        loss = model(X1).square().sum()
    tape.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        tape.backward(loss)


def test_backwards_inside_the_tape_are_not_noted() -> None:
    model, parameters = net()
    tape = Tape(parameters.index, 5)
    with tape:
        x = X1.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        loss = model(X1 + slope.detach()).square().sum()
    assert not tape.uses
    tape.backward(loss)
    assert len(tape.uses) == 2


def test_second_derivatives_are_refused() -> None:
    model, parameters = net()
    with Tape(parameters.index, 5):
        x = X1.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|once_differentiable"):
        slope.square().sum().backward()


@pytest.mark.parametrize("rows", [1, 4, 10])
def test_inputs_with_another_number_of_rows_are_not_covered(rows: int) -> None:
    model, parameters = net()
    tape = Tape(parameters.index, 5)
    with tape:
        model(torch.randn(rows, 3).double())
    assert tape.uncovered == {0, 1, 2, 3}


def test_a_loss_without_parameters_has_no_uses() -> None:
    model, parameters = net()
    tape = Tape(parameters.index, 5)
    with tape:
        loss = X1.sum()
    assert tape.backward(loss, tuple(model.parameters())) == (None,) * 4
    assert not tape.uses


def test_what_reads_only_layouts_is_covered() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    tape = Tape({id(parameter): 0}, 5)
    with tape:
        assert parameter.shape == (2, 2)
        assert parameter.size(0) == parameter.dim() == len(parameter) == 2
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad
        assert parameter.grad is None
        assert parameter.numel() == 4
        parameter.detach()
        with torch.no_grad():
            parameter.norm()
    assert not tape.uncovered
    with tape:
        parameter.square()
    assert tape.uncovered == {0}


def test_other_layouts_of_a_bare_parameter_are_not_covered() -> None:
    """The examples' own dimension must not be a parameter's."""
    parameter = nn.Parameter(torch.randn(5, 3))
    for use in (
        lambda: parameter + torch.randn(5, 3),  # one row of the parameter for each example
        lambda: torch.randn(5, 1) * parameter,
        lambda: torch.add(torch.randn(5, 5, 3), parameter, alpha=2),
        lambda: parameter.expand(2, 5, 3),
        lambda: parameter * parameter,
    ):
        tape = Tape({id(parameter): 0}, 5)
        with tape:
            use()
        assert tape.uncovered == {0}


def test_routes_may_be_replaced() -> None:
    model, parameters = net()
    tape = Tape(parameters.index, 5, routes={})
    with tape:
        model(X1)
    assert tape.uncovered == {0, 1, 2, 3}


def test_only_a_bias_keeps_no_input() -> None:
    use = LinearUse(None, 0, torch.ones(2, 3), torch.ones(2))
    tape = Tape({}, 5)
    output = tape.record(use, torch.randn(5, 3, requires_grad=True))
    assert output is not None
    output.sum().backward()
    assert use.input.stride() == (0, 0)
    assert tape.uses == [use]


def test_models_stay_plain() -> None:
    """Nothing is left on the model: it can be pickled, and its state has the same names."""
    model, parameters = net()
    tape = Tape(parameters.index, 5)
    with tape:
        loss = model(X1).square().sum()
    tape.backward(loss)
    again = pickle.loads(pickle.dumps(model))
    assert list(again.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert not any(vars(p) for p in model.parameters())


def test_nothing_outlives_the_step() -> None:
    """A use must not hold the history of its input, which holds the use: no collector sees that."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    parameters = list(model.parameters())
    tape = Tape({id(p): i for i, p in enumerate(parameters)}, 5)
    with tape:
        loss = model(torch.randn(5, 3)).sum()
    tape.backward(loss)
    assert len(tape.uses) == 2
    watched = [weakref.ref(use) for use in tape.uses]
    del tape, loss
    gc.collect()
    assert [seen() for seen in watched] == [None, None]
