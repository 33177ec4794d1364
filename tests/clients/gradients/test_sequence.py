"""Sequences: what is run by hand is what autograd runs, within rounding; hooks are called."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import BatchStatistics, PaddedBatch
from fedsim.clients.gradients.recording import RuledModel
from fedsim.clients.gradients.rule_gradients import ModuleSequence, RuleGradients
from fedsim.models.losses import cross_entropy


def mlp() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 9, bias=False)]
    return nn.Sequential(*layers, nn.Sequential(nn.Tanh(), nn.Linear(9, 7)), nn.Identity())


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=(2, 1), padding=1),
        nn.GroupNorm(2, 8),
        nn.Sigmoid(),
        nn.MaxPool2d((2, 3), stride=(1, 2)),
        nn.Conv2d(8, 4, 2, bias=False),
        nn.GroupNorm(1, 4, affine=False),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 7),
    )


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1, padding=1),
        nn.MaxPool2d((3, 2), ceil_mode=True),
        nn.Flatten(),
        nn.Linear(16 * 3 * 4, 7),
    )


def convolved() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 16, 2, stride=2),
        nn.Tanh(),
        nn.Conv2d(16, 20, 2),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(20, 7),
    )


def partly_frozen() -> nn.Module:
    model = cnn()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ("1.bias", "4.weight", "7.weight"))
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(13, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 7, (13,), generator=generator)


def through_torch_func() -> nn.Module:
    """A part of the sequence is a unit."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(),
        nn.Dropout(0.0), nn.Linear(288, 7), nn.LeakyReLU(inplace=True), nn.Linear(7, 7),
    )  # fmt: skip


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(256, 7), nn.Sigmoid())


def tied() -> nn.Module:
    shared = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), shared, nn.ReLU(), shared)


def by_autograd(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


UNITS = {through_torch_func: ["2"]}


@pytest.mark.parametrize(("clients", "dtype"), [(1, torch.float64), (3, torch.float32)])
@pytest.mark.parametrize(
    "make", [mlp, cnn, pooled, convolved, partly_frozen, through_torch_func, words, tied]
)
def test_a_sequence_by_hand_is_a_sequence_by_autograd(
    make: Callable[[], nn.Module], dtype: torch.dtype, clients: int
) -> None:
    torch.manual_seed(0)
    model, (x, y) = make().to(dtype), batch()
    x, y = x[: 4 * clients].to(dtype), y[: 4 * clients]
    if make is words:
        x = (3 * x.flatten(1)).clamp(0, 8).long()
    parameters = FlatParameters(model)
    ways = [
        RuleGradients(model, loss, parameters=parameters, units=UNITS.get(make, ()))
        for loss in (cross_entropy, by_autograd)
    ]
    assert ModuleSequence(ways[0].ruled).is_usable
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(clients, parameters.size, generator=generator).to(dtype)
    values = parameters.data + 0.1 * noise
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    found = [way.gradients(x, y, values) for way in ways]
    assert found[0].any()
    assert ((found[0] - found[1]).norm(dim=1) <= tolerance * found[1].norm(dim=1)).all()
    weights = torch.rand(len(x), generator=generator).to(dtype)
    sums = [torch.zeros_like(values) for _ in ways]
    for way, into in zip(ways, sums, strict=True):
        way.add_sums(values, PaddedBatch(clients, x, y, weights), into)
    torch.testing.assert_close(*sums, rtol=100 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("make", [mlp, cnn])
def test_clipped_sums_by_hand_are_those_by_autograd(
    make: Callable[[], nn.Module], add_clipped_sum: Callable[..., BatchStatistics]
) -> None:
    torch.manual_seed(0)
    model, (x, y) = make(), batch()
    parameters, sums = FlatParameters(model), []
    clipping = FlatClipping(0.5)
    for loss in (cross_entropy, by_autograd):
        way = RuleGradients(model, loss, parameters=parameters)
        into = torch.zeros_like(parameters.data, dtype=torch.float64)
        add_clipped_sum(way, x, y, clipping, clipping.groups(parameters), into)
        sums.append(into)
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-6)
    assert sums[0].any()


class Residual(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


def test_what_is_no_sequence_is_left_to_autograd() -> None:
    for model in (Residual(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)):
        assert not ModuleSequence(RuledModel(model, FlatParameters(model))).is_usable


def test_a_hook_that_comes_later_is_called() -> None:
    gradients, (x, y) = RuleGradients(mlp(), cross_entropy), batch()
    values, padded = gradients.parameters.data.unsqueeze(0), PaddedBatch(1, x, y, torch.ones(13))
    model, seen = gradients.model, list[str]()
    assert isinstance(model, nn.Sequential)
    before = gradients.gradients(x, y, values)
    handles = [
        model[1].register_forward_hook(lambda *_: seen.append("forward")),
        model[2].register_full_backward_hook(lambda *_: seen.append("backward")),
        model[3].register_forward_pre_hook(lambda *_: seen.append("before")),
    ]
    gradients.record(values, padded)
    assert sorted(seen) == ["backward", "before", "forward"]
    for handle in handles:
        handle.remove()
    gradients.record(values, padded)
    assert len(seen) == 3
    torch.testing.assert_close(gradients.gradients(x, y, values), before)


def test_the_backward_pass_stops_at_the_first_trained_layer() -> None:
    """What lies before it may have no gradient at all, as indices have."""

    class Once(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.round()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), Once(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 7))
    model[2].requires_grad_(False)
    x, y = batch()
    parameters = FlatParameters(model)
    ways = [
        RuleGradients(model, loss, parameters=parameters) for loss in (cross_entropy, by_autograd)
    ]
    torch.testing.assert_close(*(way.gradients(x, y) for way in ways), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_knows_its_gradient(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    outputs = 30 * torch.randn(33, 10, generator=generator)
    outputs[0, 3], outputs[1, 0] = torch.inf, torch.nan
    targets = torch.randint(0, 10, (33,), generator=generator)
    targets[2] = -100  # torch's mark of a target that does not count
    weights = torch.rand(33, generator=generator) if weighted else None

    def by_torch(targets: Tensor, rows: slice, weights: Tensor | None) -> Tensor:
        leaf = outputs[rows].clone().requires_grad_()
        losses = functional.cross_entropy(leaf, targets[rows], reduction="none")
        total = losses.sum() if weights is None else torch.dot(losses, weights)
        return torch.autograd.grad(total, leaf)[0]

    ours = cross_entropy.output_gradient(outputs, targets, weights)
    theirs = by_torch(targets, slice(None), weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)
    soft = torch.softmax(torch.randn(33, 10, generator=generator), 1)
    ours = cross_entropy.output_gradient(outputs[3:], soft[3:])
    theirs = by_torch(soft, slice(3, None), None)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
