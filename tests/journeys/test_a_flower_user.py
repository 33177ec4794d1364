"""A user of Flower: FedAdam, a partition of their own, a metric of their own, own model."""

import json

import pytest

pytestmark = pytest.mark.slow

EXPERIMENT = """
name: flower-user
data:
  dataset: digits
  partition: {scheme: "./task.py:by_parity"}
model: {name: "./task.py:build", args: {width: 32}}
federation: {rounds: 12, strategy: {name: fedadam, server_lr: 0.05}}
local: {steps: 2, batch_size: 64, optimizer: {name: sgd, lr: 0.5}}
privacy: {target_epsilon: 8.0, delta: 1.0e-3, max_grad_norm: 0.5}
evaluation: {metrics: [accuracy, recall_per_class, "./task.py:even_odd"]}
"""
TASK = '''
"""The user's own code, as it was in their Flower app."""
import numpy as np
from torch import nn


def by_parity(features, targets, seed):
    """Return the examples of each of six clients: even digits on three, odd ones on three."""
    rng = np.random.default_rng(seed)
    parts = []
    for parity in (0, 1):
        own = rng.permutation(np.flatnonzero(targets % 2 == parity))
        parts.extend(np.array_split(own, 3))
    return parts


def build(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


def even_odd(outputs, targets):
    """Share of test examples whose parity is predicted."""
    return (outputs.argmax(1) % 2 == targets % 2).float().mean().item()
'''


def test_fedadam_with_a_partition_and_a_metric_of_their_own(journey) -> None:
    journey.write("exp.yaml", EXPERIMENT)
    journey.write("task.py", TASK)
    journey.type("fedsim validate --data exp.yaml")
    journey.type("fedsim run exp.yaml --out runs/first --quiet")
    last = json.loads((journey.home / "runs/first/rounds.jsonl").read_text().splitlines()[-1])
    assert last["test_even_odd"] >= last["test_accuracy"] > 0.5
    assert len(last["test_recall_per_class"]) == 10
    privacy = json.loads((journey.home / "runs/first/privacy.json").read_text())
    assert len(privacy["clients"]) == 6
    assert privacy["system_epsilon"] <= 8.0
    assert "sound" in journey.type("fedsim verify runs/first").stdout
    assert "even" in (journey.home / "runs/first/report.html").read_text()
