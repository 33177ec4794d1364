"""The benchmark runs; what it measures is for people to read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="runs a script of a checkout")
def test_the_benchmark_measures_every_contender() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "durability.py"), "--quick", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {"nothing on disk", "ledger and checkpoint, ratio", "checkpoint alone"} <= set(found)
    assert all(found[name] > 0 for name in found if name != "overhead, ratio")
