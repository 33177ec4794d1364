"""No ordinary model is refused for its padded batches: another height is found, at worst 1."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.padded_batches import padded_rows
from fedsim.clients.model_checks.bit_isolation import RowIsolation

Model = tuple[nn.Module, Tensor, int]
"""A model, examples, and its number of outputs."""


def linear(random: Random) -> Model:
    width, out = (
        2 ** random.randint(0, 10) + random.randint(0, 3),
        random.choice([1, 2, 3, 10, 100]),
    )
    return nn.Linear(width, out), torch.randn(6, width), out


def perceptron(random: Random) -> Model:
    widths = [2 ** random.randint(2, 8) + random.randint(0, 3) for _ in range(3)]
    out = random.choice([1, 2, 10])
    layers = [nn.Linear(widths[0], widths[1]), nn.ReLU(), nn.Linear(widths[1], widths[2])]
    return (
        nn.Sequential(*layers, nn.Tanh(), nn.Linear(widths[2], out)),
        torch.randn(6, widths[0]),
        out,
    )


def convolution(random: Random) -> Model:
    groups, channels = random.choice([1, 2, 4]), random.choice([4, 8, 12, 16])
    size, dilation = random.randint(9, 14), random.choice([1, 2])
    stride = random.choice([1, 2])
    model = nn.Sequential(
        nn.Conv2d(4, channels, 3, stride=stride, padding=1, groups=groups),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 2, dilation=dilation, groups=groups),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, 5),
    )
    return model, torch.randn(6, 4, size, size), 5


class Last(nn.Module):
    """A recurrent layer, and a linear one on its last step."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0][:, -1])


def recurrent(random: Random) -> Model:
    width, kind = random.choice([4, 7, 16]), random.choice([nn.RNN, nn.GRU, nn.LSTM])
    return Last(kind(5, width, batch_first=True), width), torch.randn(6, random.randint(2, 6), 5), 3


class Attention(nn.Module):
    """One head over a short sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / x.shape[2] ** 0.5
        return self.out(self.norm(x + scores.softmax(2) @ self.value(x)).mean(1))


def attention(random: Random) -> Model:
    width = random.choice([4, 8, 20])
    return Attention(width), torch.randn(6, random.randint(2, 8), width), 4


def embedding(random: Random) -> Model:
    words, width = random.choice([10, 100]), random.choice([3, 8, 16])
    length = random.randint(1, 6)
    model = nn.Sequential(nn.Embedding(words, width), nn.Flatten(), nn.Linear(width * length, 6))
    return model, torch.randint(0, words, (6, length)), 6


KINDS: list[Callable[[Random], Model]] = [
    linear,
    perceptron,
    convolution,
    recurrent,
    attention,
    embedding,
]


def loss_for(out: int) -> Callable[[Tensor, Tensor], Tensor]:
    def bce(outputs: Tensor, targets: Tensor) -> Tensor:
        own = targets.to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs[:, 0], own, reduction="none")

    def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")

    return bce if out == 1 else cross_entropy


def check(number: int, largest: int) -> None:
    """Find the padded batches of one random model."""
    random = Random(number)
    torch.manual_seed(number)
    model, x, out = KINDS[number % len(KINDS)](random)
    dtype = random.choice([torch.float32, torch.float64])
    model, y = model.to(dtype), torch.arange(6) % max(2, out)
    x = x.to(dtype) if x.is_floating_point() else x
    gradients: Any = gradients_for(model, loss_for(out), x, y)
    rows = padded_rows(min(largest, int(2 ** random.uniform(0, 12))))
    height = RowIsolation(gradients, x, y).height(1, rows)
    assert height >= 1, (number, rows)


def test_no_ordinary_model_is_refused() -> None:
    for number in range(12):
        check(number, 96)


def test_a_logistic_model_on_200_rows_is_computed() -> None:
    """It was refused: one of its products treats 200 rows in another way by place."""
    for width in (3, 8, 13, 16, 30, 64):
        torch.manual_seed(width)
        x, y = torch.randn(6, width), torch.arange(6) % 2
        gradients: Any = gradients_for(nn.Linear(width, 1), loss_for(1), x, y)
        for clients in (1, 2):
            assert RowIsolation(gradients, x, y).height(clients, 200) >= 64


@pytest.mark.slow
def test_none_of_12_more_ordinary_models_is_refused() -> None:
    for number in range(12, 24):
        check(number, 4096 if number % len(KINDS) < 2 else 512)


@pytest.mark.long
def test_none_of_300_ordinary_models_is_refused() -> None:
    for number in range(12, 312):
        check(number, 4096 if number % len(KINDS) < 2 else 512)
