"""The benchmark of federations: every contender does the work that it is timed for.

Its sizes here are too small for its numbers to count.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Measure = Callable[..., tuple[list[Any], str]]


class StageHere:
    """In place of a contender's own process: the contender in this one."""

    def __init__(self, key: str, work: Any) -> None:
        self._contender = import_module("contenders").CONTENDERS[key].make()
        self._contender.prepare(work)
        self.name = self._contender.name

    def wait(self) -> None: ...

    def rounds(self, number: int) -> dict[str, float]:
        return import_module("contenders.stage").timed_rounds(self._contender, number)

    def __enter__(self) -> "StageHere":
        return self

    def __exit__(self, *_: object) -> None:
        self._contender.close()


@pytest.fixture
def measure(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Measure:
    """Run the script with contenders in this process, or in their own; return rows and output."""

    def run(mode: str, *contenders: str, here: bool = True) -> tuple[list[Any], str]:
        federation, out = script("federation"), tmp_path / "out.json"
        if here:
            monkeypatch.setattr(federation, "Stage", StageHere)
        options = ["--quick", "--json", str(out), "--plot", str(tmp_path / "out.svg")]
        options += ["--modes", mode, "--contenders", *contenders]
        monkeypatch.setattr(sys, "argv", ["federation.py", *options])
        federation.main()
        return json.loads(out.read_text())["rows"], capsys.readouterr().out

    return run


def assert_measured(rows: list[Any], printed: str, *contenders: str) -> None:
    assert [row["contender"] for row in rows] == list(contenders)
    for row in rows:
        assert row["name"] in printed
        assert row["processor"] > 0
        assert row["wall"] > 0
        assert row["megabytes"] > 10
        assert len(row["wall_turns"]) == len(row["processor_turns"]) == 1
    assert rows[0]["processor_ratio"] == rows[0]["wall_ratio"] == [1, 1, 1]


@pytest.mark.slow  # real processes
def test_it_measures_wall_and_processor_time_of_each(measure: Measure, tmp_path: Path) -> None:
    rows, printed = measure("private", "bare", "fedsim-apart", here=False)
    assert_measured(rows, printed, "bare", "fedsim-apart")
    assert (tmp_path / "out.svg").read_text().count("<svg") == 1


@pytest.mark.slow  # a real process
def test_who_is_not_installed_is_left_out_and_named(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PFL_PYTHON", sys.executable)
    rows, printed = measure("plain", "pfl", here=False)
    assert rows == []
    assert "pfl is left out: No module named 'pfl'" in printed


@pytest.mark.slow
def test_processes_that_a_contender_starts_are_counted(shared_ray: None, measure: Measure) -> None:
    (row,), _ = measure("plain", "fedsim-ray-2")
    assert row["megabytes"] > 600, "two workers, each with torch, and Ray's own processes"
    assert row["processor"] > 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")
def test_flower_with_opacus_does_its_work(shared_ray: None, measure: Measure) -> None:
    """The contender checks itself that every client answered, charged and told its epsilon."""
    from ray import cloudpickle

    modules = [import_module(f"contenders.{name}") for name in ("flower_opacus", "base")]
    for module in modules:  # the workers do not know where the benchmarks are
        cloudpickle.register_pickle_by_value(module)
    (row,), _ = measure("private", "flower-opacus")
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)
    assert row["private"]
    assert row["wall"] > 0


@pytest.mark.slow
@pytest.mark.skipif(
    "PFL_PYTHON" not in os.environ,
    reason="PFL_PYTHON names no interpreter that has pfl-research",
)
def test_pfl_research_does_its_work(measure: Measure) -> None:
    (row,), _ = measure("plain", "pfl", here=False)
    assert not row["private"]
    assert row["wall"] > 0


def test_goals_alone_are_measured_with_their_contenders(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = script("federation")
    monkeypatch.setattr(sys, "argv", ["federation.py", "--goals", "--contenders", "bare", "fedsim"])
    found = federation.cases(federation.options_of_main())
    work = import_module("contenders.base").Work
    assert found[work("mlp", 200, True)] == found[work("builtin-cnn", 50, True)]
    assert found[work("mlp", 200, True)] == ["bare", "fedsim"]
    assert found[work("small", 10_000, True)] == ["fedsim"]


def goals(rows: list[dict[str, Any]]) -> list[str]:
    return [number.line() for number in import_module("contenders.goals").goal_numbers(rows)]


def test_a_goal_is_judged_by_the_rows() -> None:
    row = {"model": "cnn", "private": True, "clients": 200}
    one = {**row, "contender": "fedsim-ray-1", "name": "one"}
    two = {**row, "contender": "fedsim-ray-2", "name": "two", "wall": 1.0}
    for wall, verdict in ((1.6, "missed"), (1.8, "met")):
        (line,) = goals([{**one, "wall": wall}, two])
        assert "private: fedsim-ray-1 / fedsim-ray-2, wall time" in line
        assert f"benchmark CNN, 200 clients: {wall:g} (" in line
        assert f"goal ≥ 1.7, {verdict})" in line


def test_a_ratio_is_the_median_over_pairs_of_turns() -> None:
    """The machine has slowed down after the second turn, between two neighbours."""
    row = {"model": "cnn", "private": True, "clients": 200, "wall": 2.0}
    slow = {**row, "contender": "fedsim-ray-1", "name": "one", "wall_turns": [1.8, 1.8, 3.6]}
    fast = {**row, "contender": "fedsim-ray-2", "name": "two", "wall_turns": [1.0, 2.0, 2.0]}
    assert "clients: 1.8 (1.35 to 1.8; goal" in goals([slow, fast])[0]


def test_the_machines_own_limit_is_no_goal() -> None:
    row = {"model": "cnn", "private": True, "clients": 20}
    one = {**row, "contender": "fedsim", "name": "one", "wall": 1.5}
    two = {**row, "contender": "fedsim-apart", "name": "two", "wall": 1.0}
    (line,) = goals([one, two])
    assert "fedsim / fedsim-apart, wall time, benchmark CNN, 20 clients: 1.5" in line
    assert "goal" not in line


def test_many_small_clients_are_judged_by_time_memory_and_growth() -> None:
    row = {"model": "small", "private": True, "contender": "fedsim", "name": "fedsim"}
    few = {**row, "clients": 100, "wall": 1e-3, "processor": 1e-3, "megabytes": 400}
    many = {**row, "clients": 10_000, "wall": 1e-4, "processor": 1.2e-3, "megabytes": 450}
    time, memory, growth = goals([few, many])
    assert "time: 1 s (1 to 1; goal ≤ 1.2, met)" in time
    assert "peak memory: 450 MB (goal ≤ 450, met)" in memory
    assert "among 100: 1.2 (goal ≤ 1.3, met)" in growth
    large = goals([few, {**many, "megabytes": 3000}])[1]
    assert "peak memory: 3000 MB (goal ≤ 450, missed)" in large
    assert goals([few]) == []


def test_who_has_no_turn_is_paused_with_all_its_processes() -> None:
    processes = import_module("contenders.processes")
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo started; wait"], stdout=-1) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"started\n"
        family = (shell.pid, *processes.descendants(shell.pid))
        assert len(family) == 2

        def wait_until_all_are(wanted: str) -> None:
            """The kernel takes a moment to stop or wake a process."""
            deadline = time.monotonic() + 60
            while {processes.state(one) for one in family} != {wanted}:
                assert time.monotonic() < deadline
                time.sleep(0.001)

        wait_until_all_are("S")
        processes.pause(shell.pid)
        wait_until_all_are("T")
        processes.resume(shell.pid)
        wait_until_all_are("S")
        for one in family:
            os.kill(one, signal.SIGKILL)
