"""The benchmark runs; its sizes here are too small for its numbers to count."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "secure_aggregation.py"


@pytest.mark.slow
@pytest.mark.skipif(not SCRIPT.exists(), reason="runs the script of a checkout")
def test_it_runs_and_prints_every_goal() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert len(rows) == 8
    assert all(row["value"] > 0.0 for row in rows)
    assert "scaled up from" in result.stdout
