"""The benchmark runs; its sizes here are too small for its numbers to count."""

import json
import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.slow
def test_it_runs_and_prints_every_goal(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["secure_aggregation.py", "--quick", "--json"])
    script("secure_aggregation").main()
    printed = capsys.readouterr().out
    rows = json.loads(printed.splitlines()[-1])["rows"]
    assert len(rows) == 8
    assert all(row["value"] > 0.0 for row in rows)
    assert "scaled up from" in printed
