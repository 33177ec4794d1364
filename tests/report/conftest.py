"""Run directories as a run leaves them, made without running anything.

Metrics are plausible, not computed. Every ε is what its ledger adds up to: no other is stated.
"""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import root_scalar

import fedsim
from fedsim.accountant.pld.privacy_profile import gaussian_epsilon
from fedsim.accountant.sampler_slack import target_without_slack
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import SCHEMAS, LinesFile
from fedsim.statement import read_facts, to_json
from fedsim.statement.privacy_file import ledger_digest

DELTA = 1e-3

Clients = list[dict[str, Any]]
Make = Callable[..., RunDirectory]

EXPERIMENT = """\
name: {name}
seed: 0
data:
  dataset: digits
  test_fraction: 0.2
  partition:
    scheme: dirichlet
    num_clients: {clients}
    alpha: 0.5
    min_examples: 20
model:
  name: mlp
  args:
    hidden:
      - 32
  loss: cross_entropy
federation:
  rounds: {planned}
  clients_per_round: {clients}
  strategy: fedavg
  weighting: uniform
local:
  steps: 5
  batch_size: 28
  optimizer:
    name: sgd
    lr: 1.0
"""


def make_clients(count: int, *, rounds: int, target: float | None = 8.0) -> Clients:
    """Return `count` private clients that each did 5 steps in each of `rounds` rounds."""
    random = np.random.default_rng(7)
    sizes = random.integers(60, 260, size=count)
    spends = [target - random.gamma(1.2, 0.12) for _ in sizes] if target else 2 / sizes * 300
    return [
        private_client(number, int(size), round(float(spend), 2), rounds, target)
        for number, (size, spend) in enumerate(zip(sizes, spends, strict=True))
    ]


def private_client(
    number: int, examples: int, epsilon: float | None, rounds: int, target: float | None = 8.0
) -> dict[str, Any]:
    """Return a client whose ledger adds up to `epsilon`, without noise where that is None."""
    noise = 0.0 if epsilon is None else round_noise(epsilon or 1.0, 5 * max(rounds, 1))
    event = {"type": "Gaussian", "noise_multiplier": noise}
    sampled = {"type": "PoissonSampled", "sampling_rate": 1.0, "event": event}
    if rounds == 0:
        epsilon = 0.0
    return {
        "client": number,
        "examples": examples,
        "delta": DELTA,
        "epsilon": epsilon,
        "epsilon_rdp": None if epsilon is None else epsilon * 1.09,
        "target_epsilon": target,
        "noise_multiplier": noise,
        "sampling_rate": 1.0,
        "max_grad_norm": 0.5,
        "rounds": rounds,
        "steps": 5 * rounds,
        "ledger": [{"event": sampled, "count": 5 * rounds}] if rounds else [],
        "ledger_head": f"{number:064x}",
    }


@cache
def round_noise(epsilon: float, steps: int) -> float:
    """Return the noise with which `steps` full batches spend `epsilon`, and never more."""
    bracket = (1e-6, 1e4)
    exact, delta = target_without_slack(epsilon, DELTA)
    found = root_scalar(lambda mu: gaussian_epsilon(mu, delta) - exact, bracket=bracket)
    return math.sqrt(steps) / float(found.root) * (1 + 1e-9)


def make_rounds(count: int, clients: Clients, *, private: bool, task: str) -> Clients:
    """Return `count` rounds of a model that learns and an ε that grows."""
    random = np.random.default_rng(3)
    final = max((spend["epsilon"] or 0.0 for spend in clients), default=0.0)
    rows = []
    for number in range(1, count + 1):
        progress = 1 - math.exp(-number / 9) + random.normal() * 0.012
        metrics = (
            {"test_loss": 2.3 - 1.9 * progress, "test_accuracy": 0.1 + 0.82 * progress}
            if task == "classification"
            else {
                "test_loss": 3 - 2.6 * progress,
                "test_mse": 6 - 5 * progress,
                "test_r2": progress,
            }
        )
        rows.append(
            {
                "round": number,
                **metrics,
                "participants": [spend["client"] for spend in clients],
                "failed": [],
                "withdrawn": [],
                "seconds": 0.1234,
                "epsilon_max": final * math.sqrt(number / count) if private else None,
                "traffic": {"down": 96_400, "up": 96_400},
                "update_norm": 1.0 + 2.0 / number,
                "noise_norm": 1.0 if private else None,
            }
        )
    return rows


@pytest.fixture(name="private_client")
def _private_client() -> Callable[..., dict[str, Any]]:
    return private_client


@pytest.fixture(name="make_rounds")
def _make_rounds() -> Callable[..., Clients]:
    return make_rounds


@pytest.fixture(scope="session", name="write_run")
def _write_run() -> Make:
    return write_run


@pytest.fixture
def make_run(tmp_path: Path) -> Make:
    """Return a function that makes a run directory; see `write_run`."""

    def make(**settings: Any) -> RunDirectory:
        number = len(list(tmp_path.iterdir()))
        return write_run(tmp_path / f"run{number}", **settings)

    return make


def write_run(
    path: Path,
    *,
    name: str = "digits-dp",
    clients: int | Clients = 10,
    rounds: int | Clients = 40,
    planned: int = 40,
    private: bool = True,
    task: str = "classification",
    status: str = "completed",
    target: float | None = 8.0,
) -> RunDirectory:
    """Write the directory of a run through the writers that a real run uses."""
    finished = rounds if isinstance(rounds, int) else len(rounds)
    spends = (
        make_clients(clients, rounds=finished, target=target)
        if isinstance(clients, int)
        else clients
    )
    if not private:
        spends = [
            {"client": s["client"], "examples": s["examples"], "epsilon": None, "ledger": []}
            for s in spends
        ]
    rows = (
        make_rounds(rounds, spends, private=private, task=task)
        if isinstance(rounds, int)
        else rounds
    )
    directory = RunDirectory(path)
    directory.create(
        experiment=EXPERIMENT.format(name=name, clients=len(spends), planned=planned),
        environment=_environment(),
        inputs={},
    )
    directory.unlock()
    rounds_file = LinesFile(directory.rounds)
    for row in rows:
        rounds_file.append(json.dumps(row))
    privacy = _privacy(spends, private=private)
    directory.write_json("privacy.json", privacy)
    directory.write_clients(spends)
    directory.write_json("summary.json", _summary(name, status, rows, privacy))
    return directory


def _privacy(clients: Clients, *, private: bool) -> dict[str, Any]:
    epsilons = [spend["epsilon"] for spend in clients]
    largest = None if None in epsilons else max(epsilons)
    content = {
        "schema": SCHEMAS["privacy.json"],
        "version": fedsim.__version__,
        "private": largest is not None,
        "trust": "local",
        "unit": "example",
        "adjacency": "zero_out" if private else None,
        "accountant": "pld" if private else None,
        "sampling": "poisson" if private else None,
        "clipping": "flat" if private else None,
        "noise": "seeded" if private else None,
        "system_epsilon": largest,
        "slack": None if largest is None else {"epsilon": 1e-5, "delta": 1e-9},
        "ledger_digest": ledger_digest(clients) if private else None,
        "secure_aggregation": None,
        "personal_models": None,
        "clients": clients,
    }
    return {**content, **to_json(read_facts(content))}


def _summary(name: str, status: str, rows: Clients, privacy: dict[str, Any]) -> dict[str, Any]:
    last = rows[-1] if rows else {}
    private = privacy["accountant"] is not None
    largest = privacy["system_epsilon"]
    return {
        "name": name,
        "status": status,
        "reason": "every client failed" if status == "failed" else None,
        "rounds": len(rows),
        **{key: value for key, value in last.items() if key.startswith("test_")},
        "epsilon": {"max": largest, "median": largest, "min": largest} if private else None,
        "delta": max(s["delta"] for s in privacy["clients"]) if private else None,
        "seconds": 4.936,
        "sizes": {
            "test_examples": 359,
            "input_shape": [1, 8, 8],
            "num_classes": 10,
            "parameters": 2410,
            "trained_parameters": 2410,
        },
    }


def _environment() -> dict[str, Any]:
    return {
        "fedsim": fedsim.__version__,
        "schema": SCHEMAS["environment.json"],
        "python": "3.12.3",
        "platform": "Linux-6.8.0-x86_64-with-glibc2.39",
        "packages": {"torch": "2.9.0", "flwr": "1.41.0", "numpy": "2.3.5", "scipy": "1.16.3"},
        "seed": 0,
        "commit": "425ad13f6d0e3f6ef1b6cf9d1e8a0d8d4c2f4b11+changes",
    }
