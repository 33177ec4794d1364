"""The distribution, as a stranger gets it: built, installed without the checkout, and run."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.wheel

EXPERIMENT = """\
name: from-a-wheel
data:
  dataset: digits
  partition: {scheme: iid, num_clients: 3}
model: {name: ./net.py:build, loss: cross_entropy}
federation: {rounds: 2}
local: {steps: 2, batch_size: 32, optimizer: {name: sgd, lr: 0.5}}
privacy: {target_epsilon: 8.0, delta: 1.0e-3, max_grad_norm: 0.5}
"""
NET = """\
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def call(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_wheel_runs_an_experiment_without_the_checkout(tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("fedsim_dp-*.whl")
    assert list(tmp_path.glob("fedsim_dp-*.tar.gz"))
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fedsim"}
    assert "fedsim/py.typed" in names
    assert "fedsim/starter/files/test_model.py" in names

    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)

    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    (tmp_path / "net.py").write_text(NET)
    fedsim = tmp_path / "env" / "bin" / "fedsim"
    summary = json.loads(
        call(fedsim, "run", "e.yaml", "--quiet", "--json", "--out", "run", cwd=tmp_path)
    )
    assert summary["status"] == "completed"
    assert summary["epsilon"]["max"] <= 8.0
    assert (tmp_path / "run" / "report.html").stat().st_size > 5000
    where = call(python, "-c", "import fedsim.accountant as a; print(a.__file__)", cwd=tmp_path)
    assert str(tmp_path) in where
