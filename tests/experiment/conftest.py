"""A good file to break, and a place to write it."""

from collections.abc import Callable
from pathlib import Path

import pytest

GOOD = """\
name: demo
seed: 7
data:
  dataset: digits
  test_fraction: 0.2
  partition: {scheme: dirichlet, num_clients: 10, alpha: 0.5}
model:
  name: mlp
  args: {hidden: [32]}
federation:
  rounds: 4
  clients_per_round: 10
  weighting: uniform
local:
  steps: 5
  batch_size: 28
  optimizer: {name: sgd, lr: 1.0}
privacy:
  noise_multiplier: 1.1
  delta: 1.0e-3
  max_grad_norm: 0.5
runtime: {engine: local}
"""

WriteFile = Callable[[str | bytes], Path]


@pytest.fixture
def good() -> str:
    return GOOD


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteFile:
    """Write `exp.yaml` in an empty current directory, so that messages name it just so."""
    monkeypatch.chdir(tmp_path)

    def write_file(content: str | bytes) -> Path:
        path = Path("exp.yaml")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file
