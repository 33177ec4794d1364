"""The local optimizers are torch's, to the bit, for one client and for stacked ones."""

import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.local_settings import AdamSettings, OptimizerSettings, SgdSettings
from fedsim.clients.training.shared_model import make_optimizer

SETTINGS = [
    SgdSettings(name="sgd", lr=0.3),
    SgdSettings(name="sgd", lr=0.3, weight_decay=0.01),
    SgdSettings(name="sgd", lr=0.1, momentum=0.9),
    SgdSettings(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    AdamSettings(name="adam", lr=0.02),
    AdamSettings(name="adam", lr=0.02, weight_decay=0.01),
    AdamSettings(name="adamw", lr=0.02, weight_decay=0.01),
]
SHAPES = [(7, 5), (13,), (64, 33)]
STEPS = 6


def torch_optimizer(settings: OptimizerSettings, values: list[nn.Parameter]) -> object:
    if isinstance(settings, SgdSettings):
        return torch.optim.SGD(
            values,
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(values, lr=settings.lr, weight_decay=settings.weight_decay)


def starts(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradients(seed: int, step: int) -> list[Tensor]:
    return starts(1000 * seed + step + 1)


def trained(settings: OptimizerSettings, seed: int) -> list[Tensor]:
    optimizer, values = make_optimizer(settings), starts(seed)
    for step in range(STEPS):
        optimizer.step(values, gradients(seed, step))
    return values


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_are_those_of_torch(settings: OptimizerSettings) -> None:
    values = [nn.Parameter(start) for start in starts(1)]
    oracle = torch_optimizer(settings, values)
    for step in range(STEPS):
        for value, gradient in zip(values, gradients(1, step), strict=True):
            value.grad = gradient
        oracle.step()  # type: ignore[attr-defined]
    for ours, theirs in zip(trained(settings, 1), values, strict=True):
        assert torch.equal(ours, theirs.detach())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_stacked_clients_step_as_each_alone(settings: OptimizerSettings) -> None:
    """To the bit: a client's values lie anywhere in a vector register, ends of rows included."""
    clients = 5

    def row(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    stacked = torch.stack([row(starts(seed)) for seed in range(clients)])
    optimizer = make_optimizer(settings)
    for step in range(STEPS):
        optimizer.step([stacked], [torch.stack([row(gradients(k, step)) for k in range(clients)])])
    for seed in range(clients):
        assert torch.equal(stacked[seed], row(trained(settings, seed)))
