"""A few of the kills of `kills.py`; a hundred with local trust are in the long stage.

tests/runs/test_crash.py visits the states of the disk one by one: every fifth, and all in `long`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import fedsim.report.run

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes"),
]


@pytest.fixture
def kills(beside: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return kills.py, which replaces the report of a run."""
    monkeypatch.setattr(fedsim.report.run, "write_report", fedsim.report.run.write_report)
    return beside("kills")


@pytest.mark.slow  # real processes
def test_no_run_is_damaged_or_unspent_by_five_attacks(tmp_path: Path, kills: ModuleType) -> None:
    found = kills.figures_of(5, tmp_path)
    assert found["faults"] == []
    kinds = ("kill", "two processes", "full disk", "damage")
    assert [found[kind] for kind in kinds] == [2, 1, 1, 1]
    assert found["kills"] == 4


@pytest.mark.slow
def test_no_sum_is_opened_twice_or_below_its_minimum_by_five_attacks(
    tmp_path: Path, kills: ModuleType
) -> None:
    """Distributed trust, dropouts down to `min_clients` and, in one round, below."""
    found = kills.figures_of(5, tmp_path, experiment=kills.DISTRIBUTED)
    assert found["faults"] == []
    kinds = ("kill", "two processes", "full disk", "damage")
    assert [found[kind] for kind in kinds] == [2, 1, 1, 1]
    assert found["kills"] == 4
    rounds = map(json.loads, (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines())
    survivors = [row["secure_aggregation"]["survivors"] for row in rounds]
    assert survivors == [5, 4, 3, 0, 5]
    spent = json.loads((tmp_path / "whole" / "privacy.json").read_text())["clients"]
    assert {one["rounds"] for one in spent} == {5}, "a round that is given up stays charged"


@pytest.mark.long
def test_no_run_is_damaged_or_unspent_by_a_hundred_kills(tmp_path: Path, kills: ModuleType) -> None:
    found = kills.figures_of(100, tmp_path)
    assert found["faults"] == []
    assert found["kills"] == 80
