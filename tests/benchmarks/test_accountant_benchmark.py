"""The benchmark of the accountant runs; its sizes here are too small for its numbers to count."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accountant.py"


@pytest.mark.slow
@pytest.mark.skipif(not SCRIPT.exists(), reason="runs the script of a checkout")
def test_it_runs_and_prints_every_case() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    for case in "abcd":
        assert f"\n({case}) " in result.stdout
    record = json.loads(result.stdout.splitlines()[-1])
    ratios = [row["ratio"] for case in record["cases"] for row in case["contenders"]]
    assert all(ratio > 0.0 for ratio in ratios)
