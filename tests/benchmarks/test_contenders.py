"""The contenders of the federation benchmark do the work that they are timed for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="runs scripts of a checkout"),
]

CODE = """
import sys
sys.path.insert(0, {benchmarks!r})
from {module} import {contender}
from torch import nn
def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 10))
print({contender}({arguments}input_shape=(1, 4, 4)).run(2, 1, model))
"""


def seconds(module: str, contender: str, arguments: str = "") -> float:
    code = CODE.format(
        benchmarks=str(ROOT / "benchmarks"),
        module=module,
        contender=contender,
        arguments=arguments,
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return float(result.stdout.splitlines()[-1])


def test_flower_with_opacus_finishes_its_rounds() -> None:
    pytest.importorskip("ray")
    pytest.importorskip("opacus")
    assert 0 < seconds("flower_opacus", "FlowerOpacus") < 60


@pytest.mark.skipif(
    "PFL_PYTHON" not in os.environ,
    reason="PFL_PYTHON names no interpreter that has pfl-research",
)
def test_pfl_research_finishes_its_rounds() -> None:
    python = os.environ["PFL_PYTHON"]
    assert 0 < seconds("pfl_research", "PflResearch", f"python={python!r}, ") < 60
