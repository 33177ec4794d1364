"""Noise has the distribution that the ledger is charged for, or nothing is released.

Every check of a distribution rejects right noise with a probability below 3e-9; a run of this file
makes fewer than 200 of them.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from scipy import stats
from torch import Tensor, nn

from fedsim.clients import PrivacyEngine
from fedsim.clients.app import BatchClientApp
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.core.streams import Purpose, stream_key
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.noise.release import NoiseRangeError, Scales, check_deviations, release_
from fedsim.noise.sources import NoiseSource, SecureNoise, SeededNoise
from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import TrainReply, TrainRequest
from fedsim.runs.runner import run_experiment

SIZE = 100_000
FALSE_ALARM = 1e-9
SWEEP = [10.0**k for k in range(-30, 31, 10)]
Fill = Callable[[Tensor, float], Tensor]


def check_normal(values: Tensor, deviation: float) -> None:
    """Values are independent N(0, deviation²): Kolmogorov-Smirnov, and χ² of mean and variance."""
    unit = values.double().cpu().numpy() / deviation
    n = len(unit)
    assert stats.kstest(unit, "norm").pvalue > FALSE_ALARM
    assert 2 * stats.norm.sf(abs(unit.mean()) * math.sqrt(n)) > FALSE_ALARM
    spread = stats.chi2(n).cdf(float((unit**2).sum()))
    assert min(spread, 1 - spread) > FALSE_ALARM / 2


def seeded() -> SeededNoise:
    return SeededNoise(stream_key(11, Purpose.NOISE))


def released(source: NoiseSource, deviation: float, dtype: torch.dtype, device: str) -> Tensor:
    """The release of a sum of 0 with noise of a deviation, between two rows of another client."""
    sums = torch.zeros(3, SIZE, dtype=torch.float64, device=device)
    steps = torch.tensor([[1.0], [deviation], [0.0]], dtype=torch.float64, device=device) / 2**24
    into = torch.empty(3, SIZE, dtype=dtype, device=device)
    release_(sums, [seeded(), source, None], Scales(steps, [SIZE]), into)
    assert not into[2].any()
    return into[1]


SOURCES: dict[str, Callable[[], NoiseSource]] = {"seeded": seeded, "secure": SecureNoise}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("source", SOURCES)
def test_noise_is_normal_at_every_deviation_or_refused(source: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    limits = [info.tiny * 2.0**20, info.max / 2.0**20]
    for deviation in (*SWEEP, *limits):
        check_normal(released(SOURCES[source](), deviation, dtype, "cpu"), deviation)
        check_deviations([deviation], dtype)
    for deviation in (info.tiny, info.max, info.tiny / 8, math.inf, math.nan, -1.0):
        with pytest.raises(NoiseRangeError, match="keeps the normal distribution from"):
            check_deviations([deviation], dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("source", SOURCES)
def test_noise_on_a_gpu_is_normal_at_every_deviation(source: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for deviation in (info.tiny * 2.0**20, *SWEEP, info.max / 2.0**20):
        check_normal(released(SOURCES[source](), deviation, dtype, "cuda"), deviation)


def squared_deviation(values: Tensor, deviation: float) -> Tensor:
    """Box-Muller with the deviation under the root, in float32: σ² is 0 or infinite."""
    uniforms, angle = torch.rand(len(values)) + 2**-33, torch.rand(len(values))
    variance = torch.tensor(deviation) * torch.tensor(deviation)
    return (-2 * variance * uniforms.log()).sqrt() * (2 * math.pi * angle).cos()


def laplace(values: Tensor, deviation: float) -> Tensor:
    noise = np.random.default_rng(0).laplace(size=len(values)) / math.sqrt(2)
    return values.copy_(torch.from_numpy(noise * deviation))


def few_uniforms(values: Tensor, deviation: float) -> Tensor:
    """16 different values: quantiles of the normal distribution."""
    levels = torch.randint(16, (len(values),), generator=torch.manual_seed(0))
    unit = stats.norm.ppf((np.arange(16) + 0.5) / 16)
    return torch.from_numpy(unit / unit.std())[levels] * deviation


@pytest.mark.parametrize(
    ("wrong", "deviation"),
    [
        (squared_deviation, 1e-25),
        (squared_deviation, 1e25),
        (lambda values, deviation: 0.97 * released(seeded(), deviation, values.dtype, "cpu"), 1.0),
        (lambda values, deviation: 0.03 + released(seeded(), deviation, values.dtype, "cpu"), 1.0),
        (laplace, 1.0),
        (few_uniforms, 1.0),
    ],
)
def test_mutation_slightly_wrong_noise_is_rejected(wrong: Fill, deviation: float) -> None:
    with pytest.raises(AssertionError):
        check_normal(wrong(torch.empty(SIZE), deviation), deviation)


# --- max_grad_norm: 1e-24 with lr: 1e25 -----------------------------------------------------------

PLUGIN = """
import numpy as np
import torch


def load(seed=0):
    return np.ones((40, 100), dtype=np.float32), np.arange(40) % 3


def build():
    return torch.nn.Linear(100, 500, bias=False)


def loss(outputs, targets):
    return 0.0 * outputs.sum(1)
"""


def experiment(bound: float, lr: float = 1.0, **privacy: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "data": {"dataset": "./p.py:load", "partition": {"scheme": "iid", "num_clients": 2}},
        "model": {"name": "./p.py:build", "loss": "./p.py:loss"},
        "federation": {"rounds": 1},
        "local": {"steps": 1, "batch_size": 4, "optimizer": {"name": "sgd", "lr": lr}},
        "privacy": {"noise_multiplier": 1.5, "delta": 1e-3, "max_grad_norm": bound, **privacy},
    }


@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("block", [(0,), (0, 1)])
def test_a_client_with_a_tiny_bound_releases_noise(
    noise: str, block: tuple[int, ...], tmp_path: Path
) -> None:
    """The gradient is 0, so the update is lr · noise, of deviation lr · z · C / L."""
    (tmp_path / "p.py").write_text(PLUGIN)
    loaded = load_experiment(experiment(1e-18, 1e18, noise=noise), base=tmp_path)
    federation = assemble(loaded, ledger=None)
    start = federation.initial_arrays()
    app = BatchClientApp(federation.client_task, block_of=lambda round_number, client: block)
    context = Context(1, 7, {"partition-id": 0}, RecordDict(), {})
    with server_identity(1):
        reply = TrainReply.from_message(app(TrainRequest(1, start).to_message(7), context))
    (before,), (after,) = to_numpy(start).values(), reply.arrays.values()
    check_normal(torch.from_numpy(after - before).flatten(), 1.5 / 4)


def engines(model: nn.Module, bound: float, lr: float = 1.0) -> Iterator[torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    PrivacyEngine(
        model, batch_size=1, sample_size=1, noise_multiplier=1.0, max_grad_norm=bound, seed=5
    ).attach(optimizer)
    yield optimizer


def test_a_privacy_engine_with_a_tiny_bound_releases_noise() -> None:
    model = nn.Linear(50_000, 1, bias=False)
    nn.init.zeros_(model.weight)
    (optimizer,) = engines(model, 1e-24, 1e24)
    (0.0 * model(torch.ones(1, 50_000))).mean().backward()
    optimizer.step()
    check_normal(model.weight.detach().flatten(), 1.0)


OUT_OF_RANGE: dict[str, dict[str, Any]] = {
    "subnormal": {"bound": 1e-40},
    "noise near the smallest": {"bound": 1e-25, "noise_multiplier": 1e-8},
    "a product that no float holds": {"bound": 1e-200, "noise_multiplier": 1e-200},
    "layers": {"bound": 1e-34, "clipping": "per_layer"},
    "automatic": {"bound": 1e-34, "clipping": "automatic"},
    "adaptive": {"bound": 1e-34, "clipping": {"name": "adaptive", "count_noise": 9.0}},
    "secure": {"bound": 1e-34, "noise": "secure"},
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_what_float32_cannot_hold_is_refused_before_anything_is_spent(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "p.py").write_text(PLUGIN)
    with pytest.raises(PrivacyPlanError, match=r"choose another max_grad_norm; lr can") as refused:
        run_experiment(experiment(**OUT_OF_RANGE[name]), base=tmp_path, out=tmp_path / "r")
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert "max_grad_norm" in str(refused.value)
    assert not (tmp_path / "r").exists()


def test_a_privacy_engine_refuses_them_by_the_type_of_its_model() -> None:
    with pytest.raises(NoiseRangeError, match=r"is 1e-34; float32 keeps .* from 1\.2e-32"):
        list(engines(nn.Linear(3, 1), 1e-34))
    assert list(engines(nn.Linear(3, 1).double(), 1e-34))


def test_a_bound_that_a_server_names_cannot_take_the_noise_away(tmp_path: Path) -> None:
    """Adaptive clipping goes on from the bound of a request: 1e-10 to 1e10, whatever is asked."""
    (tmp_path / "p.py").write_text(PLUGIN)
    loaded = load_experiment(
        experiment(1.0, clipping={"name": "adaptive", "count_noise": 9.0}), base=tmp_path
    )
    task = assemble(loaded, ledger=None).client_task(0)
    request = TrainRequest(1, RecordDict(), clip_norm=1e-30)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="an adaptive clip norm must be from 1e-10"):
        task.release(request)
