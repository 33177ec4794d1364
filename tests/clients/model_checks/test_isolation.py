"""Models and losses that couple examples are refused with the pair, the cause and the fix."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.model_checks.isolation import check_isolation
from fedsim.clients.model_checks.safety import UnsafeModelError

Loss = Callable[[Tensor, Tensor], Tensor]


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).mean(1) - targets) ** 2 + outputs.flatten(1).square().mean(1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


class Wrapped(nn.Module):
    """A layer, then a function of the whole batch, then a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(3, 4), Function(function), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class AttentionOverBatch(nn.Module):
    """A transformer that was given its batch where it expects the sequence."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, x, x)[0]


def data(*shape: int, n: int = 4, classes: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator)
    return x, torch.arange(n) % classes if classes else torch.randn(n, generator=generator)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (lambda x: x - x.mean(0), r"layer 'between' \(Function\) mixes"),
        (lambda x: x / x.norm(), "layer 'between'"),
        (lambda x: x / x.abs().max(), "layer 'between'"),
        (lambda x: x.roll(1, 0), "layer 'between'"),
        (lambda x: x.sort(dim=0).values, "layer 'between'"),
        (lambda x: x.flip(0), "layer 'between'"),
        (lambda x: x.cumsum(0), "layer 'between'"),
        (lambda x: functional.softmax(x @ x.t(), dim=1) @ x, "layer 'between'"),
        (lambda x: x + 1e-3 * x.detach().mean(0), "layer 'between'"),
    ],
)
@pytest.mark.parametrize("n", [2, 7])
def test_models_that_couple_examples_are_refused(
    function: Callable[[Tensor], Tensor], cause: str, n: int
) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsafeModelError, match=rf"^example \d is coupled to example \d: .*{cause}"):
        check_isolation(Wrapped(function), squared, *data(3, n=n))


@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.BatchNorm1d(3), (3,)), (nn.BatchNorm2d(3), (3, 4, 4))]
)
def test_batch_normalisation_is_refused_in_train_mode_only(
    norm: nn.Module, shape: tuple[int, ...]
) -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            norm.eval()
            return self

    layers = (norm, nn.Flatten(), nn.Linear(int(torch.Size(shape).numel()), 2))
    expected = r"layer '0' \(BatchNorm.d\) normalises over the batch; replace it by nn.GroupNorm"
    with pytest.raises(UnsafeModelError, match=expected):
        check_isolation(nn.Sequential(*layers).eval(), squared, *data(*shape))
    check_isolation(Frozen(*layers), squared, *data(*shape))


def test_batch_normalisation_without_statistics_is_refused_in_eval_mode_too() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    with pytest.raises(UnsafeModelError, match="normalises over the batch"):
        check_isolation(nn.Sequential(norm, nn.Linear(3, 1)), squared, *data(3))


def test_attention_over_the_batch_is_refused() -> None:
    torch.manual_seed(0)
    x, y = data(5, 4)
    check_isolation(AttentionOverBatch(batch_first=True), squared, x, y)
    with pytest.raises(UnsafeModelError, match=r"layer 'mix' \(MultiheadAttention\)"):
        check_isolation(AttentionOverBatch(batch_first=False), squared, x, y)


def info_nce(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(
        outputs @ outputs.t(), torch.arange(len(outputs)), reduction="none"
    )


class_weights = torch.tensor([1.0, 5.0, 0.2])
COUPLING_LOSSES: dict[str, Loss] = {
    "info-nce": info_nce,
    "info-nce mean": lambda o, t: info_nce(o, t).mean(),
    "weighted mean": nn.CrossEntropyLoss(weight=class_weights),
    "ignored mean": nn.CrossEntropyLoss(ignore_index=1),
    "weighted by hand": lambda o, t: (
        cross_entropy(o, t) * class_weights[t] / class_weights[t].sum()
    ),
    "batch size": lambda o, t: cross_entropy(o, t) / len(o),
    "hardest": lambda o, t: cross_entropy(o, t).max(),
    "root of the mean": lambda o, t: cross_entropy(o, t).mean().sqrt(),
    "focal of the mean": lambda o, t: cross_entropy(o, t) * cross_entropy(o, t).mean().detach(),
    "neighbours": lambda o, t: (o - o.roll(1, 0)).square().sum(1),
    "next label": lambda o, t: cross_entropy(o, t.roll(1)),
}


@pytest.mark.parametrize("name", COUPLING_LOSSES)
def test_losses_that_couple_examples_are_refused(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(UnsafeModelError, match=r"coupled to example \d.*the loss mixes .*'none'"):
        check_isolation(model, COUPLING_LOSSES[name], *data(3, classes=3))


@pytest.mark.parametrize("size", [0.1, 1e-3])
def test_opposite_changes_of_two_equal_examples_are_seen(size: float) -> None:
    torch.manual_seed(0)
    x, y = data(3, n=3)
    x[2], y[2] = x[1], y[1]
    sign = torch.tensor([0.0, 1.0, -1.0])

    def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
        return squared(outputs, targets) * (1 + size * sign * targets[0])

    with pytest.raises(UnsafeModelError, match="example 1 is coupled to example 0"):
        check_isolation(nn.Linear(3, 2), shifted, x, y)


def test_a_coupling_of_examples_without_a_gradient_is_seen() -> None:
    class WithFeatures(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.cat([super().forward(input), input], dim=1)

    torch.manual_seed(0)
    x, _ = data(3, n=3)

    def ignored(outputs: Tensor, targets: Tensor) -> Tensor:
        beyond = functional.relu(outputs[:, 2:].abs().max() - 1.01 * x.abs().max())
        return outputs[:, :2].square().sum(1) * torch.where(targets > 0, 1.0, 1e-4 * beyond)

    with pytest.raises(UnsafeModelError, match="example 0 is coupled to example 1"):
        check_isolation(WithFeatures(3, 2), ignored, x, torch.tensor([0.0, 1.0, 1.0]))


@pytest.mark.parametrize("name", ["info-nce", "root of the mean", "neighbours"])
def test_zero_weights_hide_no_coupling(name: str) -> None:
    model = nn.Linear(3, 3)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(UnsafeModelError):
        check_isolation(model, COUPLING_LOSSES[name], *data(3, classes=3))
    assert not any(bool(p.any()) for p in model.parameters())


@pytest.mark.parametrize(
    "loss",
    [
        cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=class_weights, reduction="sum"),
        nn.CrossEntropyLoss(weight=class_weights, reduction="none"),
        nn.CrossEntropyLoss(ignore_index=1, reduction="none"),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ],
)
def test_losses_that_are_sums_over_examples_are_accepted(loss: Loss) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    check_isolation(model, loss, *data(3, classes=3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x) if not self.training or random.random() < 0.5 else x


def deep(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


SAFE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 2), (4,)),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm2d(4, affine=True),
            nn.Flatten(),
            nn.LayerNorm(64),
            nn.RMSNorm(64),
            nn.Linear(64, 2),
        ),
        (4, 4, 4),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)),
        (4,),
    ),
    "transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True), 2
        ),
        (5, 4),
    ),
    "lstm": (Recurrent, (6, 4)),
    "stochastic depth": (StochasticDepth, (4,)),
    "deep": (lambda: deep(64, 30), (64,)),
    "saturated": (lambda: nn.Sequential(deep(8, 2), nn.Hardtanh(-1e-9, 1e-9)), (8,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            *(m for _ in range(6) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        ),
        (3, 6, 6),
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in SAFE),
        *((name, torch.bfloat16) for name in ("deep", "convolutions")),
        ("saturated", torch.float64),
    ],
)
def test_legitimate_models_are_accepted(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = SAFE[name]
    x, y = data(*shape)
    check_isolation(make().to(dtype), squared, x.to(dtype), y.to(dtype))


def test_features_of_very_different_sizes_are_no_coupling() -> None:
    torch.manual_seed(0)
    x, y = data(6)
    x *= torch.tensor([1e-6, 1.0, 1e3, 1e6]).unsqueeze(1)
    check_isolation(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), squared, x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1e-20, 1e-40])
def test_small_gradients_are_compared_in_every_type(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(6, 2).to(dtype), data(6)
    x, y = (x * 1e-3).to(dtype), y.to(dtype)
    check_isolation(model, lambda o, t: size * squared(o, t), x, y)
    if size > torch.finfo(dtype).tiny:
        with pytest.raises(UnsafeModelError, match="is coupled to example"):
            check_isolation(model, lambda o, t: size * squared(o, t) * (1 + 0.1 * t[0]), x, y)


def test_words_are_accepted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    check_isolation(model, cross_entropy, torch.randint(0, 9, (4, 5)), torch.randint(0, 3, (4,)))


def test_nothing_is_changed_and_no_global_generator_is_drawn_from() -> None:
    class Norm(nn.BatchNorm1d):
        pass

    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), Norm(4), StochasticDepth())
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    with pytest.raises(UnsafeModelError, match="normalises over the batch"):
        check_isolation(model, squared, *data(3))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [m.training for m in model] == [True, False, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_batch_of_one_must_work() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).squeeze()

    torch.manual_seed(0)
    with pytest.raises(UnsafeModelError, match="fails on one example alone"):
        check_isolation(Squeezed(), cross_entropy, *data(3, classes=3))


def test_losses_of_another_shape_are_refused() -> None:
    with pytest.raises(UnsafeModelError, match=r"returned shape \(8,\) for 4 examples"):
        check_isolation(nn.Linear(3, 2), lambda o, t: o.flatten(), *data(3))


def test_randomness_that_cannot_be_repeated_is_said() -> None:
    source = torch.Generator().manual_seed(0)

    class Unrepeatable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.always = True

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(len(x), 1, generator=source) if self.training or self.always else 1
            return self.layer(x * noise)

    model = Unrepeatable()
    with pytest.raises(UnsafeModelError, match="draw random numbers with torch"):
        check_isolation(model, squared, *data(3))
    model.always = False  # in eval mode it can be seen
    check_isolation(model, squared, *data(3))


def test_gradients_that_are_not_finite_show_nothing() -> None:
    with pytest.raises(UnsafeModelError, match="not finite"):
        check_isolation(nn.Linear(3, 2), lambda o, t: o.sum(1) * torch.nan, *data(3))


@pytest.mark.parametrize("n", [0, 1])
def test_one_example_shows_nothing(n: int) -> None:
    with pytest.raises(ValueError, match="at least 2 examples"):
        check_isolation(nn.Linear(3, 2), squared, torch.randn(n, 3), torch.randn(n))
