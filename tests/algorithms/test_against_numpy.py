"""Whole runs of every algorithm against a few lines of numpy: three rounds, to 1e-6."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsim.algorithms.algorithm import algorithms
from fedsim.runs.runner import run_experiment

PLUGIN = """
import numpy as np
import torch
from torch import nn


def data(seed=0):
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(4), [6, 9, 12, 15])
    x = rng.normal(size=(42, 3)).astype(np.float32) + users[:, None].astype(np.float32) / 2
    y = (x @ [1.0, -1.0, 0.5] + rng.normal(size=42) > 0.7).astype(np.int64)
    return x, y, x[:8], y[:8]


def equal(seed=0):
    # every example of a client is its first one: every batch has the same gradient
    x, y, *test = data(seed)
    first = np.repeat([0, 6, 15, 27], [6, 9, 12, 15])
    return x[first], y[first], *test


def user(features, targets, seed):
    return np.repeat(np.arange(4), [6, 9, 12, 15])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False).double()
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.2, -0.1]]))

    def forward(self, x):
        return self.linear(x.double())


def net():
    return Net()
"""
NAME, ROUNDS, STEPS, LR, CLIP = "linear.weight", 3, 4, 0.2, 0.3
START = np.array([[0.1, -0.2, 0.3], [0.0, 0.2, -0.1]], np.float32).astype(np.float64)


def clients(of: str = "data") -> list[tuple[np.ndarray, np.ndarray]]:
    scope: dict[str, Any] = {}
    exec(PLUGIN, scope)  # the same arrays
    x, y, *_ = scope[of]()
    users = scope["user"](x, y, 0)
    return [(x[users == k].astype(float), y[users == k]) for k in range(4)]


def losses_and_gradients(w: np.ndarray, k: int, of: str = "data") -> tuple[np.ndarray, np.ndarray]:
    """Return the loss (n,) and the gradient (n, 2, 3) of each example of a client."""
    x, y = clients(of)[k]
    z = x @ w.T
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    error = p - np.eye(2)[y]
    return -np.log(p[np.arange(len(y)), y]), error[:, :, None] * x[:, None, :]


def local(
    x: np.ndarray, k: int, steps: int, change: Callable[[np.ndarray], Any], clip: float | None
) -> np.ndarray:
    """Return client k's model after full-batch steps from x; `change` is added to each gradient."""
    w = x.copy()
    for _ in range(steps):
        each = losses_and_gradients(w, k)[1]
        if clip is not None:
            norms = np.sqrt((each**2).sum((1, 2), keepdims=True))
            each = each * np.minimum(1.0, clip / norms)
        w = w - LR * (each.mean(0) + change(w))
    return w


def mean(models: Sequence[np.ndarray], weights: Sequence[float] = (1, 1, 1, 1)) -> np.ndarray:
    return np.average(np.stack(models), axis=0, weights=list(weights))


def fedavg(x: np.ndarray, clip: float | None = None) -> np.ndarray:
    for _ in range(ROUNDS):
        x = mean([local(x, k, STEPS, lambda w: 0.0, clip) for k in range(4)])
    return x


def fedprox(x: np.ndarray, clip: float | None = None) -> np.ndarray:
    for _ in range(ROUNDS):
        x = mean([local(x, k, STEPS, lambda w, at=x: 0.7 * (w - at), clip) for k in range(4)])
    return x


def scaffold(x: np.ndarray, clip: float | None = None) -> np.ndarray:
    c, own = np.zeros_like(x), np.zeros((4, *x.shape))
    for _ in range(ROUNDS):
        y = [local(x, k, STEPS, lambda w, d=c - own[k]: d, clip) for k in range(4)]
        new = np.stack([own[k] - c + (x - y[k]) / (STEPS * LR) for k in range(4)])
        x, c, own = x + 0.9 * (mean(y) - x), c + (new - own).mean(0), new
    return x


def qfedavg(x: np.ndarray) -> np.ndarray:
    q, smooth = 0.5, 1 / LR
    for _ in range(ROUNDS):
        steps, total = np.zeros_like(x), 0.0
        for k in range(4):
            loss = losses_and_gradients(x, k)[0].mean()
            move = smooth * (x - local(x, k, STEPS, lambda w: 0.0, None))
            steps += loss**q * move
            total += q * loss ** (q - 1) * (move**2).sum() + smooth * loss**q
        x = x - steps / total
    return x


def robust(x: np.ndarray, rule: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    for _ in range(ROUNDS):
        x = rule(np.stack([local(x, k, STEPS, lambda w: 0.0, None) for k in range(4)]))
    return x


def optimized(x: np.ndarray, kind: str) -> np.ndarray:
    """Return the model of a server optimizer with its paper's defaults."""
    m, v, tau = np.zeros_like(x), np.full_like(x, 1e-6), 1e-3
    for _ in range(ROUNDS):
        delta = mean([local(x, k, STEPS, lambda w: 0.0, None) for k in range(4)]) - x
        if kind == "fedavgm":
            m = 0.9 * m + delta
            x = x + m
            continue
        beta = 0.0 if kind == "fedadagrad" else 0.9
        m = beta * m + (1 - beta) * delta
        v = {
            "fedadagrad": v + delta**2,
            "fedadam": 0.99 * v + 0.01 * delta**2,
            "fedyogi": v - 0.01 * delta**2 * np.sign(v - delta**2),
        }[kind]
        x = x + 0.1 * m / (np.sqrt(v) + tau)
    return x


def krum(models: np.ndarray) -> np.ndarray:
    flat = models.reshape(4, -1)
    squares = ((flat[:, None] - flat[None]) ** 2).sum(2)
    scores = np.sort(squares, axis=1)[:, 1:3].sum(1)  # n - f - 2 = 2 neighbours
    return models[np.argmin(scores)]


def run(tmp_path: Path, strategy: object, **changes: Any) -> Any:
    (tmp_path / "p.py").write_text(PLUGIN)
    experiment = {
        "name": "numpy",
        "data": {"dataset": "./p.py:data", "partition": {"scheme": "./p.py:user"}},
        "model": {"name": "./p.py:net"},
        "federation": {"rounds": ROUNDS, "strategy": strategy},
        "local": {"steps": STEPS, "batch_size": "full", "optimizer": {"name": "sgd", "lr": LR}},
        "privacy": None,
        **changes,
    }
    return run_experiment(experiment, base=tmp_path, out=tmp_path / "run")


CASES: dict[str, tuple[object, Callable[[np.ndarray], np.ndarray]]] = {
    "fedavg": ("fedavg", fedavg),
    "fedprox": ({"name": "fedprox", "proximal_weight": 0.7}, fedprox),
    "scaffold": ({"name": "scaffold", "server_lr": 0.9}, scaffold),
    "qfedavg": ({"name": "qfedavg", "q": 0.5}, qfedavg),
    "fedmedian": ("fedmedian", lambda x: robust(x, lambda y: np.median(y, axis=0))),
    "trimmed_mean": (
        {"name": "trimmed_mean", "trimmed_share": 0.25},
        lambda x: robust(x, lambda y: np.sort(y, axis=0)[1:3].mean(0)),
    ),
    "krum": ("krum", lambda x: robust(x, krum)),
    **{
        kind: (kind, partial(optimized, kind=kind))
        for kind in ("fedavgm", "fedadagrad", "fedadam", "fedyogi")
    },
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_run_is_the_papers_formula(name: str, tmp_path: Path) -> None:
    strategy, expected = CASES[name]
    found = load_file(run(tmp_path, strategy).path / "model.safetensors")[NAME]
    np.testing.assert_allclose(found, expected(START), atol=1e-6)
    if name != "fedavg":
        assert np.abs(found - fedavg(START)).max() > 1e-3, "not FedAvg"


PRIVATE = {"noise_multiplier": 0.0, "delta": 1e-3, "max_grad_norm": CLIP}


@pytest.mark.parametrize("vectorized_clients", ["auto", "off"])
@pytest.mark.parametrize("name", ["fedprox", "scaffold"])
def test_with_privacy_a_rule_is_added_to_the_release_of_clipped_gradients(
    name: str, vectorized_clients: str, tmp_path: Path
) -> None:
    expected = {"fedprox": fedprox, "scaffold": scaffold}[name](START, CLIP)
    local = {"steps": STEPS, "batch_size": "full", "optimizer": {"name": "sgd", "lr": LR}}
    found = run(
        tmp_path,
        CASES[name][0],
        privacy=PRIVATE,
        local={**local, "vectorized_clients": vectorized_clients},
    )
    np.testing.assert_allclose(
        load_file(found.path / "model.safetensors")[NAME], expected, atol=1e-6
    )
    assert np.abs(expected - scaffold(START)).max() > 1e-3, "clipping changes the model"


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fednova_normalises_by_steps(momentum: float, tmp_path: Path) -> None:
    """Clients take 4, 6, 8 and 10 steps, by their sizes."""
    x, p = START, np.array([6, 9, 12, 15]) / 42
    steps = [4, 6, 8, 10]
    norm = [sum((1 - momentum ** (k - i)) / (1 - momentum) for i in range(k)) for k in steps]
    for _ in range(ROUNDS):
        models = []
        for k in range(4):
            w, v = x.copy(), np.zeros_like(x)
            for _ in range(steps[k]):
                v = momentum * v + losses_and_gradients(w, k, "equal")[1].mean(0)
                w = w - LR * v
            models.append(w)
        d = [(x - models[k]) / norm[k] for k in range(4)]
        tau = sum(p[k] * norm[k] for k in range(4))
        x = x - tau * sum(p[k] * d[k] for k in range(4))
    found = run(
        tmp_path,
        "fednova",
        data={"dataset": "./p.py:equal", "partition": {"scheme": "./p.py:user"}},
        federation={"rounds": ROUNDS, "strategy": "fednova", "weighting": "examples"},
        local={
            "epochs": 2,
            "batch_size": 3,
            "optimizer": {"name": "sgd", "lr": LR, "momentum": momentum},
        },
    )
    np.testing.assert_allclose(load_file(found.path / "model.safetensors")[NAME], x, atol=1e-6)


def test_every_built_in_algorithm_is_here() -> None:
    later = {"mr_mtl", "local_only"} & set(algorithms())  # tests/algorithms/test_mr_mtl.py
    assert set(algorithms()) == {*CASES, "fednova", *later}
