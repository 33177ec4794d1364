"""A small comparison that runs in seconds."""

from pathlib import Path

import pytest

BASE = """\
name: tiny
data:
  dataset: digits
  partition: {scheme: iid, num_clients: 3}
model: {name: logistic}
federation: {rounds: 2}
local:
  steps: 1
  batch_size: 32
  optimizer: {name: sgd, lr: 0.5}
privacy:
  target_epsilon: 8.0
  delta: 1e-4
  max_grad_norm: 0.5
"""

COMPARISON = """\
base: tiny.yaml
seeds: 2
baseline: plain
variants:
  plain: {privacy: null}
  dp: {}
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(BASE)
    (tmp_path / "compare.yaml").write_text(COMPARISON)
    return tmp_path
