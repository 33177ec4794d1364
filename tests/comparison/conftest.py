"""A small comparison that runs in seconds."""

from collections.abc import Callable
from pathlib import Path

import pytest

import fedsim
from fedsim.comparison import compare
from fedsim.comparison.comparison_result import ComparisonResult

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
  delta: 1.0e-4
  max_grad_norm: 0.5
"""

COMPARISON = """\
base: tiny.yaml
seeds: 2
baseline: plain
client_metrics: true
variants:
  plain: {privacy: null}
  dp: {}
"""


Write = Callable[[Path], None]


@pytest.fixture(scope="session")
def write_files() -> Write:
    """Writes `tiny.yaml` and `compare.yaml` into a directory."""

    def write(directory: Path) -> None:
        (directory / "tiny.yaml").write_text(BASE)
        (directory / "compare.yaml").write_text(COMPARISON)

    return write


@pytest.fixture
def directory(tmp_path: Path, write_files: Write) -> Path:
    write_files(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def compared(
    tmp_path_factory: pytest.TempPathFactory, write_files: Write, execute_jobs: Callable[..., None]
) -> ComparisonResult:
    """A finished comparison, run in this process; tests only look at it."""
    directory = tmp_path_factory.mktemp("compared")
    write_files(directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "execute", execute_jobs)
        return fedsim.compare(directory / "compare.yaml", out=directory / "out")
