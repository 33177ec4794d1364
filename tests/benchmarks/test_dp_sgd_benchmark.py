"""The benchmark runs; what it measures is for people to read."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="runs a script of a checkout")
def test_the_benchmark_prints_ratios() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "dp_sgd.py"), "--quick"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for title in ("MLP, batch 16", "small CNN, batch 16", "large CNN, batch 16", "10 clients"):
        assert title in result.stdout
    assert "fedsim, cohort" in result.stdout
