"""The benchmark of federations runs; its sizes here are too small for its numbers to count."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "federation.py"


@pytest.mark.slow
@pytest.mark.skipif(not SCRIPT.exists(), reason="runs the script of a checkout")
def test_it_measures_every_contender(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(out), "--plot", str(plot)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6
    for row in rows:
        assert row["contender"] in result.stdout
        assert row["client_rounds_per_second"] > 0
        assert row["peak_megabytes"] > 10
    assert plot.read_text().count("<svg") == 1
