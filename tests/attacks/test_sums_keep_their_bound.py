"""One example moves what is rounded and noised by no more than the ledger is charged for.

The released integers are rint(S) + Z, where S is the sum of clipped gradients in steps of the grid.
Removing an example must move rint(S) by at most 2²⁴ / z' in L2 norm, replacing one by twice that,
where z' is the noise multiplier in the ledger's event: for 131,072 examples, for gradients in
bfloat16 and float16, and for tiny clipping bounds. Float32 sums of so many examples moved by 1.21
C, bfloat16 ones by 3.5 C.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.accountant import Gaussian
from fedsim.clients import PrivacyEngine
from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd import step as dp_sgd_step
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.errors import ExitCode
from fedsim.models.catalog import ModelError
from fedsim.noise.release import NoiseRangeError
from fedsim.noise.sources import DEVIATION, NoiseSource
from fedsim.runs.runner import run_experiment

LOCAL = LocalSettings.model_validate(
    {"steps": 1, "batch_size": 1, "optimizer": {"name": "sgd", "lr": 1e-12}}
)
SHORT = (torch.bfloat16, torch.float16)
Data = tuple[Tensor, Tensor]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).flatten(1).sum(1)


class Sums:
    """The sums of one step of a client with q = 1, in steps of the grid, as they are rounded.

    Args:
        model: trained by a client alone.
        n: public number of examples, and the expected batch.
        bound: C.
        most: rows of a padded batch; None: all.
    """

    def __init__(self, model: nn.Module, n: int, bound: float, most: int | None = None) -> None:
        self.gradients = RuleGradients(model, squared_error)
        self.model = SharedModel(model, parameters=self.gradients.parameters)
        clipping = FlatClipping(bound)
        step = DpSgdMechanism(
            PoissonSampling(1.0), clipping, 1.0, float(n), max_physical_batch=most, largest_batch=n
        )
        self.step = step.for_model(self.gradients.parameters)

    @property
    def largest(self) -> float:
        """2²⁴ / z', the distance that the event allows."""
        event = self.step.mechanism
        assert isinstance(event, Gaussian)
        return DEVIATION / event.noise_multiplier

    def of(self, data: Data, monkeypatch: pytest.MonkeyPatch) -> Tensor:
        found: list[Tensor] = []
        release = dp_sgd_step.release_

        def spy(sums: Tensor, noises: Sequence[NoiseSource | None], *rest: Any) -> None:
            found.append(sums[0].clone())
            release(sums, noises, *rest)

        member = BlockMember(*data, StreamKey(0, 0, 1), range(1), self.step)
        with monkeypatch.context() as patch:
            patch.setattr(dp_sgd_step, "release_", spy)
            block_of(self.model, squared_error, self.gradients, LOCAL, [member]).train()
            self.model.restart()
        (sums,) = found
        return sums


def removed(data: Data, i: int) -> Data:
    keep = torch.arange(len(data[0])) != i
    return data[0][keep], data[1][keep]


def replaced(data: Data, i: int, factor: float) -> Data:
    x = data[0].clone()
    x[i] *= factor
    return x, data[1]


def check_moved(one: Tensor, other: Tensor, largest: float) -> None:
    moved = (one.round() - other.round()).norm().item()
    assert moved <= largest, f"moved by {moved / largest:.6f} of what is charged"


def check_neighbours(
    sums: Sums, data: Data, monkeypatch: pytest.MonkeyPatch, places: Sequence[int]
) -> None:
    assert sums.largest <= DEVIATION * 1.004
    whole = sums.of(data, monkeypatch)
    assert whole.norm() > 0.5 * DEVIATION
    for i in places:
        for factor, largest in ((None, 1.0), (-1.0, 2.0)):
            other = removed(data, i) if factor is None else replaced(data, i, factor)
            check_moved(whole, sums.of(other, monkeypatch), largest * sums.largest)


def aligned(n: int, d: int, dtype: torch.dtype = torch.float32) -> Data:
    """Examples with gradients in nearly one direction: their sum is as large as it can be."""
    torch.manual_seed(0)
    x = torch.randn(d) + 0.3 * torch.randn(n, d)
    return x.to(dtype), torch.full((n, 1), 1e4).to(dtype)


@pytest.mark.parametrize(("most", "places"), [(None, (0, 87_380)), (1024, (0,))])
def test_one_of_131072_examples_moves_a_sum_by_what_is_charged(
    most: int | None, places: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one padded batch, and in 128 padded batches one after the other."""
    data = aligned(131_072, 3)
    sums = Sums(nn.Linear(3, 1), len(data[0]), 1.0, most)
    check_neighbours(sums, data, monkeypatch, places)


def float32_sum(parts: Tensor) -> Tensor:
    """The sum over padded batches of 1,024 rows in float32, as a release was made of before."""
    total = torch.zeros(parts.shape[1])
    for part in parts.split(1024):
        total += part.sum(0)
    return total.double() * DEVIATION


def test_mutation_a_float32_sum_of_131072_examples_is_caught() -> None:
    x, _ = aligned(131_072, 3)
    unit = x / x.norm(dim=1, keepdim=True)
    whole = float32_sum(unit)
    keeps = [torch.arange(len(unit)) != i for i in range(0, len(unit), 20_000)]
    others = [float32_sum(unit[keep]) for keep in keeps]
    worst = max(others, key=lambda other: (whole - other).norm().item())
    with pytest.raises(AssertionError, match="of what is charged"):
        check_moved(whole, worst, DEVIATION * 1.001)


def small_model(kind: str) -> tuple[nn.Sequential, Data]:
    torch.manual_seed(1)
    n = 300
    if kind == "linear":
        return nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 1)), aligned(n, 20)
    image = torch.randn(1, 6, 6) + 0.3 * torch.randn(n, 1, 6, 6)
    layers = nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 1)
    return nn.Sequential(*layers), (image, torch.full((n, 1), 100.0))


@pytest.mark.parametrize("bound", [1.0, 1e-6])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("dtype", [*SHORT, torch.float32])
def test_gradients_of_short_types_move_a_sum_by_what_is_charged(
    dtype: torch.dtype, kind: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of these types are refused; under autocast, gradients have them all the same."""
    model, (x, y) = small_model(kind)

    class Autocast(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                return super().forward(input).float()

    check_neighbours(Sums(Autocast(*model), len(x), bound), (x, y), monkeypatch, (0, 150, 299))


# --- What is refused ------------------------------------------------------------------------------

PLUGIN = """
import torch


class Short(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.layer, self.dtype = torch.nn.Linear(64, 10).to(dtype), dtype

    def forward(self, x):
        return self.layer(x.flatten(1).to(self.dtype)).float()


def build(kind):
    return Short(getattr(torch, kind))
"""


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_federation_refuses_short_parameters_by_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(PLUGIN)
    experiment = {
        "name": "short",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
        "model": {"name": "./p.py:build", "args": {"kind": kind}},
        "federation": {"rounds": 1},
        "local": {"steps": 1, "batch_size": 24},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
    }
    with pytest.raises((UnsafeModelError, ModelError)) as refused:
        run_experiment(experiment, base=tmp_path, out=tmp_path / "r")
    assert refused.value.exit_code == ExitCode.WRONG_INPUT
    text = str(refused.value)
    assert kind in text
    assert "'layer.weight'" in text
    assert "float32" in text
    assert "\n" not in text
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("dtype", SHORT)
def test_a_privacy_engine_refuses_short_parameters_by_name(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"float32 or float64, got {kind} \('weight'\)"):
        PrivacyEngine(
            model, batch_size=2, sample_size=9, noise_multiplier=1.0, max_grad_norm=1.0, seed=5
        ).attach(optimizer)


# --- Tiny clipping bounds -------------------------------------------------------------------------

TINY = (1.0, 1e-10, 1e-18, 1e-20, 1e-22, 1e-24, 1e-30, 1e-36, 1e-44)
VALUES = 200_000  # a deviation is estimated to 0.16 %: 1 % off is 6 deviations, by chance 1e-9


def released(bound: float, dtype: torch.dtype) -> np.ndarray:
    """A release of one example whose gradient has the first coordinate alone, in bounds."""
    model = nn.Linear(VALUES, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    gradients = RuleGradients(model, squared_error)
    step = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(bound), 0.01, 1.0, largest_batch=1)
    step = step.for_model(gradients.parameters)
    x = torch.zeros(1, VALUES, dtype=dtype)
    x[0, 0] = 1.0
    found: list[Tensor] = []
    member = BlockMember(x, x.new_full((1, 1), -1e4), StreamKey(0, 0, 1), range(1), step)
    shared = SharedModel(model, parameters=gradients.parameters)
    block_of(
        *(shared, squared_error, gradients, LOCAL, [member]),
    ).train(lambda batches, values, used: found.append(values[0].clone()))
    return found[0].double().numpy() / bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bound", TINY)
def test_a_tiny_bound_keeps_noise_and_gradient_or_is_refused(
    bound: float, dtype: torch.dtype
) -> None:
    if bound * 0.01 < torch.finfo(dtype).tiny * 2.0**20:  # 20 bits to spare
        with pytest.raises(NoiseRangeError, match="choose another max_grad_norm"):
            released(bound, dtype)
        return
    found = released(bound, dtype)
    assert abs(found[0]) == pytest.approx(1.0, abs=0.08)
    assert found[1:].std() == pytest.approx(0.01, rel=0.01)
    assert abs(found[1:].mean()) < 6 * 0.01 / math.sqrt(VALUES)


def engine_of(model: nn.Module, bound: float) -> PrivacyEngine:
    return PrivacyEngine(
        model, batch_size=1, sample_size=1, noise_multiplier=0.01, max_grad_norm=bound, seed=5
    )


def test_a_privacy_engine_with_a_tiny_bound_refuses_it() -> None:
    with pytest.raises(NoiseRangeError, match="max_grad_norm"):
        engine_of(nn.Linear(20, 1, bias=False), 1e-30)


@pytest.mark.parametrize("bound", [1.0, 1e-20, 1e-24, 1e-29])
def test_a_privacy_engine_with_a_small_bound_follows_the_gradient(bound: float) -> None:
    model = nn.Linear(20, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 / bound)
    x, y = torch.arange(20.0)[None] / 50, torch.tensor([[-100.0]])
    engine = engine_of(model, bound)
    engine.attach(optimizer)
    for features, targets in engine.batches(x, y, steps=1):
        engine.backward(squared_error(model(features), targets))
        optimizer.step()
    moved, direction = -model.weight.detach()[0].double(), (x[0] / x[0].norm()).double()
    assert abs(float(moved @ direction) - 1.0) < 0.08
    assert float(moved @ direction / moved.norm()) > 0.99
