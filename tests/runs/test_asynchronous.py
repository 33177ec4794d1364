"""Asynchronous rounds: FedBuff against numpy; charges, resumed and replayed runs, refusals."""

import heapq
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import fedsim
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

PLUGIN = """
import numpy as np
import torch
from torch import nn


def data(seed=0):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(30, 3))
    y = x @ [1.0, -1.0, 0.5] + np.repeat(np.arange(5), 6)
    return x.astype(np.float32), y.astype(np.float32), x[:8].astype(np.float32), y[:8].astype(
        np.float32)


def user(features, targets, seed):
    return np.repeat(np.arange(5), 6)


def net():
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return nn.Sequential(Double(), model)


class Double(nn.Module):
    def forward(self, x):
        return x.double()
"""
STEPS, LR, ROUNDS = 3, 0.1, 9
SECONDS = [1.0, 1.6131, 2.3377, 0.7373, 5.0737]


def update(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return what full-batch steps on the mean squared error add to w."""
    start = w
    for _ in range(STEPS):
        w = w - LR * 2 * ((x @ w - y)[:, None] * x).mean(0)
    return w - start


def fedbuff(clients: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the model of Nguyen et al. 2022, algorithm 1: five train at once, a buffer of 2."""
    w, version = np.zeros(3), 0
    training = [(SECONDS[k], k, w, 0) for k in range(5)]  # end, client, model, version
    heapq.heapify(training)
    buffer: list[tuple[int, np.ndarray, int]] = []
    while version < ROUNDS:
        now, k, start, began = heapq.heappop(training)
        buffer.append((k, update(start, *clients[k]), began))
        if len(buffer) < 2:
            continue  # whoever waits in the buffer does not start again
        w = w + sum(delta / np.sqrt(1 + version - began) for _, delta, began in buffer) / 2
        version += 1
        for member, _, _ in buffer:
            heapq.heappush(training, (now + SECONDS[member], member, w, version))
        buffer.clear()
    return w


def test_the_model_is_that_of_fedbuff(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(PLUGIN)
    (tmp_path / "s.csv").write_text(
        "client,seconds\n" + "".join(f"{k},{s}\n" for k, s in enumerate(SECONDS))
    )
    settings = {
        "name": "fedbuff",
        "data": {
            "dataset": "./p.py:data",
            "partition": {"scheme": "./p.py:user"},
        },
        "model": {"name": "./p.py:net", "loss": "mse"},
        "federation": {
            "rounds": ROUNDS,
            "participation": {
                "scheme": "buffered",
                "concurrency": 5,
                "buffer_size": 2,
                "durations": {"path": "s.csv", "column": "seconds"},
            },
        },
        "local": {"steps": STEPS, "batch_size": "full", "optimizer": {"name": "sgd", "lr": LR}},
        "privacy": None,
    }
    run = run_experiment(settings, out=tmp_path / "r", base=tmp_path)
    scope: dict[str, Any] = {}
    exec(PLUGIN, scope)  # the same arrays
    x, y, *_ = scope["data"]()
    clients = [(x[6 * k : 6 * k + 6].astype(float), y[6 * k : 6 * k + 6]) for k in range(5)]
    (found,) = load_file(run.path / "model.safetensors").values()
    np.testing.assert_allclose(found.ravel(), fedbuff(clients), atol=1e-6)
    assert max(row["staleness"]["max"] for row in run.rounds) >= 2
    assert run.rounds[0]["simulated_time"] == 1.0
    assert replay_run(RunDirectory(run.path), base=tmp_path).problems == ()


BUFFERED = {"scheme": "buffered", "concurrency": 5, "buffer_size": 2}


def private(**changes: Any) -> dict[str, Any]:
    return {
        "name": "asynchronous",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 6}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 8, "participation": BUFFERED},
        "local": {"steps": 2, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": {"target_epsilon": 4.0, "delta": 1e-3, "max_grad_norm": 0.5},
        **changes,
    }


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> fedsim.RunResult:
    return run_experiment(private(), out=tmp_path_factory.mktemp("asynchronous") / "here")


def test_each_client_is_charged_for_its_trainings_and_a_resumed_run_is_the_same(
    here: fedsim.RunResult, tmp_path: Path, stop_after: Any
) -> None:
    whole = here
    run_experiment(private(), out=tmp_path / "part", callback=stop_after(4))
    again = run_experiment(private(), out=tmp_path / "part", resume=True)
    for name in ("model.safetensors", "ledger.jsonl"):
        assert (whole.path / name).read_bytes() == (again.path / name).read_bytes(), name
    assert verify_run(RunDirectory(again.path)).problems == ()
    assert replay_run(RunDirectory(again.path)).problems == ()
    taken = [sum(k in row["participants"] for row in whole.rounds) for k in range(6)]
    journal = FileJournal(whole.path / "ledger.jsonl")
    assert [len(journal.history(k)) for k in range(6)] == taken
    assert sum(taken) == 16
    assert whole.privacy is not None
    for one in whole.privacy.clients:  # the noise is calibrated to the trainings of each client
        assert 3.9 < one.epsilon <= 4.0 or not taken[one.client]


@pytest.mark.slow
def test_a_model_that_clients_train_from_is_not_lost(tmp_path: Path) -> None:
    """Rounds that are added train from the versions that the checkpoint kept."""
    settings = private(privacy={"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5})
    short = {**settings, "federation": {"rounds": 4, "participation": BUFFERED}}
    whole = run_experiment(settings, out=tmp_path / "whole")
    run_experiment(short, out=tmp_path / "r")
    longer = run_experiment(settings, out=tmp_path / "r", resume=True)
    for name, value in load_file(whole.path / "model.safetensors").items():
        np.testing.assert_array_equal(load_file(longer.path / "model.safetensors")[name], value)
    checkpoint = RunDirectory(longer.path).read_checkpoint()
    assert checkpoint is not None
    assert set(checkpoint.state.versions) <= set(range(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [{"runtime": {"engine": "ray", "workers": 2}}, {"local.vectorized_clients": "off"}],
)
def test_other_engines_train_from_the_same_versions(
    overrides: dict[str, Any], here: fedsim.RunResult, tmp_path: Path, shared_ray: None
) -> None:
    there = run_experiment(private(), overrides=overrides, out=tmp_path / "there")
    for name, value in load_file(here.path / "model.safetensors").items():
        other = load_file(there.path / "model.safetensors")[name]
        np.testing.assert_allclose(other, value, atol=1e-5)
    charged = [
        [json.loads(line)["ledger"] for line in (run.path / "ledger.jsonl").open()]
        for run in (here, there)
    ]
    assert charged[0] == charged[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"strategy": "fedadam"}, {"strategy": "fedmedian"}, {"strategy": "fednova"}],
)
def test_other_algorithms_take_stale_updates(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = private(federation={"rounds": 4, "participation": BUFFERED, **changes})
    run = run_experiment(settings, out=tmp_path / "r")
    assert verify_run(RunDirectory(run.path)).problems == ()
    assert replay_run(RunDirectory(run.path)).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "privacy",
    [
        {"unit": "client", "max_update_norm": 1.0, "target_epsilon": 8.0, "delta": 1e-3},
        {"clipping": "adaptive", "target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
        {
            "sampling": "cyclic_poisson",
            "noise_correlation": {"name": "toeplitz", "bands": 2},
            "target_epsilon": 8.0,
            "delta": 1e-3,
            "max_grad_norm": 0.5,
        },
    ],
)
def test_other_mechanisms_train_asynchronously(privacy: dict[str, Any], tmp_path: Path) -> None:
    federation = {"rounds": 4, "participation": BUFFERED}
    run = run_experiment(private(privacy=privacy, federation=federation), out=tmp_path / "r")
    assert verify_run(RunDirectory(run.path)).problems == ()
    assert replay_run(RunDirectory(run.path)).problems == ()


def test_an_algorithm_that_sends_more_than_the_model_is_refused(tmp_path: Path) -> None:
    settings = private(federation={"rounds": 2, "participation": BUFFERED, "strategy": "scaffold"})
    with pytest.raises(ExperimentError, match="scaffold sends more than the model"):
        load_experiment(settings)
