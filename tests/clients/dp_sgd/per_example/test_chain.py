"""Chains: what they record is what a tape records, to the bit but for images in another order of
memory; what is no chain is not taken."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.chain import chain_of
from fedsim.clients.dp_sgd.per_example.clipped_sum import BookKeeping
from fedsim.clients.dp_sgd.per_example.functions import MaxPool2d
from fedsim.clients.dp_sgd.per_example.links import Layer
from fedsim.clients.dp_sgd.per_example.loss_gradient import loss_gradient
from fedsim.clients.settings import LocalSettings, SgdSettings
from fedsim.clients.training.local_training import StreamKey, train_plain
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
        nn.Conv2d(8, 4, 2, groups=2, bias=False),
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


def by_patches() -> nn.Module:
    """Products with patches by channel and by place, then oneDNN with the channels last."""
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


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
    model[1].register_forward_hook(lambda *_: None)
    return model


def tied() -> nn.Module:
    shared = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), shared, nn.ReLU(), shared)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def changed() -> nn.Module:
    layer = nn.Linear(64, 7)
    layer.forward = lambda input: functional.linear(2 * input, layer.weight, layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def lot() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(13, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 7, (13,), generator=generator)


@pytest.mark.parametrize("make", [mlp, cnn, pooled, by_patches, partly_frozen])
def test_a_chain_records_what_a_tape_records(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, (x, y) = make(), lot()
    by_chain = BookKeeping(model, cross_entropy)
    by_tape = BookKeeping(model, lambda o, t: functional.cross_entropy(o, t, reduction="none"))
    chain, by_tape._chain = by_chain._chain, None
    assert chain is not None
    ours = by_chain.record(x, y)
    theirs = [use for use in by_tape.record(x, y) if use.parameters]
    assert [use.parameters for use in ours] == [use.parameters for use in theirs]
    reordered = any(isinstance(link, Layer) and link.channels_last for link in chain.links)
    assert reordered == (make in (pooled, by_patches))

    def agree(one: Tensor, other: Tensor) -> bool:
        if not reordered:
            return torch.equal(one, other)
        return bool((one - other).norm() <= 1e-5 * other.norm())

    for one, other in zip(ours, theirs, strict=True):
        assert agree(one.output_gradient, other.output_gradient)  # type: ignore[attr-defined]
        assert one.input.shape == other.input.shape  # type: ignore[attr-defined]
        if one.needs_input:  # type: ignore[attr-defined]
            assert agree(one.input, other.input)  # type: ignore[attr-defined]
    sums = []
    for way in (by_chain, by_tape):
        into = torch.zeros_like(way.parameters.data)
        clipping = FlatClipping(0.5)
        way.add_clipped_sum(x, y, clipping, clipping.groups(way.parameters), into)
        sums.append(into)
    assert agree(*sums)
    assert sums[0].any()


@pytest.mark.parametrize(
    "make",
    [
        hooked,
        tied,
        changed,
        lambda: nn.Sequential(nn.Flatten(), Doubled(64, 7)),
        lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 7)),
        lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 7))),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten()),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten()),
    ],
)
def test_whatever_may_do_something_else_is_no_chain(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert chain_of(model, FlatParameters(model).index) is None


def test_a_hook_that_comes_later_is_called() -> None:
    gradients, (x, y) = BookKeeping(mlp(), cross_entropy), lot()
    seen: list[object] = []
    gradients.record(x, y)
    model = gradients.model
    assert isinstance(model, nn.Sequential)
    handle = model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    gradients.record(x, y)
    assert len(seen) == 1
    handle.remove()
    gradients.record(x, y)
    assert len(seen) == 1


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_knows_its_gradient_to_the_bit(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    outputs = 30 * torch.randn(33, 10, generator=generator)
    outputs[0, 3], outputs[1, 0] = torch.inf, torch.nan
    targets = torch.randint(0, 10, (33,), generator=generator)
    targets[2] = -100  # torch's mark of a target that does not count
    weights = torch.rand(33, generator=generator) if weighted else None
    parameters = FlatParameters(nn.Linear(1, 1))

    def by_torch(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")

    ours = loss_gradient(cross_entropy, outputs, targets, parameters, weights)
    theirs = loss_gradient(by_torch, outputs, targets, parameters, weights)
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    soft = torch.softmax(torch.randn(33, 10, generator=generator), 1)
    ours = loss_gradient(cross_entropy, outputs[3:], soft[3:], parameters)
    theirs = loss_gradient(by_torch, outputs[3:], soft[3:], parameters)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("channels", [3, 16, 33])
def test_pooling_finds_the_places_that_torch_finds(channels: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, channels, 9, 8, generator=generator).relu_()  # zeros: places are tied
    x[0, :, 3, 4], x[1, :, 5, 5], x[2, 0] = torch.nan, torch.inf, -torch.inf
    leaf = x.clone().requires_grad_()
    expected, places = functional.max_pool2d(leaf, 3, 2, 1, return_indices=True)
    pool = MaxPool2d(nn.MaxPool2d(3, 2, 1))
    found, kept = pool.forward(x)
    assert torch.equal(kept[1], places)
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0, equal_nan=True)
    g = torch.randn(expected.shape, generator=generator)
    assert torch.equal(pool.backward(g, kept), torch.autograd.grad(expected, leaf, g)[0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("make", [mlp, pooled, by_patches])
def test_plain_training_by_hand_is_plain_training_by_torch(
    make: Callable[[], nn.Module], momentum: float
) -> None:
    """To the bit for linear layers; torch sums convolutions in another order."""
    torch.manual_seed(0)
    one, (x, y) = make(), lot()
    chain = chain_of(one, FlatParameters(one).index)
    assert chain is not None
    assert chain.sums_gradients
    other = copy.deepcopy(one)
    hand = other[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    optimizer = SgdSettings(name="sgd", lr=0.3, momentum=momentum)
    settings = LocalSettings(steps=5, batch_size=4, optimizer=optimizer)
    for model in (one, other):
        train_plain(model, cross_entropy, x, y, settings, StreamKey(0, 1, 2))
    hand.remove()
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        if make is mlp:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
