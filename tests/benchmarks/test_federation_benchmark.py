"""The benchmark of federations: every contender does the work that it is timed for.

Its sizes here are too small for its numbers to count.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BENCHMARKS.exists(), reason="runs the scripts of a checkout"),
]


def measure(folder: Path, mode: str, *contenders: str, **environment: str) -> tuple[list[Any], str]:
    out = folder / "out.json"
    options = ["--quick", "--json", str(out), "--plot", str(folder / "out.svg")]
    result = subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / "federation.py"),
            *(*options, "--modes", mode),
            "--contenders",
            *contenders,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(out.read_text())["rows"], result.stdout


def printed_by(code: str) -> list[str]:
    """Run code that may import the benchmarks' modules; return the lines that it prints."""
    path = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", path + code], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_it_measures_wall_and_processor_time_of_each(tmp_path: Path) -> None:
    rows, printed = measure(tmp_path, "private", "bare", "fedsim", "fedsim-apart")
    assert [row["contender"] for row in rows] == ["bare", "fedsim", "fedsim-apart"]
    for row in rows:
        assert row["name"] in printed
        assert 0 < row["processor"] < 1
        assert 0 < row["wall"] < 10
        assert row["megabytes"] > 10
        assert len(row["wall_turns"]) == len(row["processor_turns"]) == 1
    assert rows[0]["processor_ratio"] == rows[0]["wall_ratio"] == 1
    assert (tmp_path / "out.svg").read_text().count("<svg") == 1


def test_who_is_not_installed_is_left_out_and_named(tmp_path: Path) -> None:
    rows, printed = measure(tmp_path, "plain", "pfl", PFL_PYTHON=sys.executable)
    assert rows == []
    assert "pfl is left out: No module named 'pfl'" in printed


@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
def test_processes_that_a_contender_starts_are_counted(tmp_path: Path) -> None:
    (row,), _ = measure(tmp_path, "plain", "fedsim-ray-2")
    assert row["megabytes"] > 600, "two workers, each with torch, and Ray's own processes"
    assert row["processor"] > 0


@pytest.mark.skipif(
    find_spec("ray") is None or find_spec("opacus") is None, reason="needs Ray and Opacus"
)
def test_flower_with_opacus_does_its_work(tmp_path: Path) -> None:
    """The contender checks itself that every client answered, charged and told its epsilon."""
    (row,), _ = measure(tmp_path, "private", "flower-opacus")
    assert row["private"]
    assert 0 < row["wall"] < 10


@pytest.mark.skipif(
    "PFL_PYTHON" not in os.environ,
    reason="PFL_PYTHON names no interpreter that has pfl-research",
)
def test_pfl_research_does_its_work(tmp_path: Path) -> None:
    (row,), _ = measure(tmp_path, "plain", "pfl")
    assert not row["private"]
    assert 0 < row["wall"] < 10


def test_a_goal_is_judged_by_the_rows() -> None:
    code = (
        "from contenders.goals import goals\n"
        "row = dict(model='cnn', private=True, clients=20)\n"
        "for slow in (1.6, 1.8):\n"
        "    print(goals([dict(row, contender='fedsim-ray-1', name='one', wall=slow),\n"
        "                 dict(row, contender='fedsim-ray-2', name='two', wall=1.0)]))\n"
    )
    printed = printed_by(code)
    assert "one / two = 1.60 of wall time (goal at least 1.7: NOT met)" in printed[0]
    assert "one / two = 1.80 of wall time (goal at least 1.7: met)" in printed[1]


def test_a_ratio_is_the_median_over_pairs_of_turns() -> None:
    """The machine has slowed down after the second turn, between two neighbours."""
    code = (
        "from contenders.goals import goals\n"
        "row = dict(model='cnn', private=True, clients=20, wall=2.0)\n"
        "slow = dict(row, contender='fedsim-ray-1', name='one', wall_turns=[1.8, 1.8, 3.6])\n"
        "fast = dict(row, contender='fedsim-ray-2', name='two', wall_turns=[1.0, 2.0, 2.0])\n"
        "print(*goals([slow, fast]))\n"
    )
    assert "one / two = 1.80 of wall time" in printed_by(code)[0]


def test_the_machines_own_limit_is_no_goal() -> None:
    code = (
        "from contenders.goals import goals\n"
        "row = dict(model='cnn', private=True, clients=20)\n"
        "print(*goals([dict(row, contender='fedsim', name='one', wall=1.5),\n"
        "              dict(row, contender='fedsim-apart', name='two', wall=1.0)]))\n"
    )
    assert printed_by(code)[0].endswith("= 1.50 of wall time (the machine's own limit)")


def test_many_small_clients_are_judged_by_time_memory_and_growth() -> None:
    code = (
        "from contenders.goals import goals\n"
        "row = dict(model='small', private=True, contender='fedsim', name='fedsim')\n"
        "few = dict(row, clients=100, wall=1e-3, processor=1e-3, megabytes=400)\n"
        "many = dict(row, clients=10000, wall=2e-3, processor=1.2e-3, megabytes=500)\n"
        "print(*goals([few, many]), *goals([few, dict(many, megabytes=3000)]), sep='\\n')\n"
        "print(len(goals([few])))\n"
    )
    printed = printed_by(code)
    assert "a round 20 s (goal at most 30: met)" in printed[0]
    assert "peak memory 500 MB (goal at most 2000: met)" in printed[1]
    assert "with 100 clients 1.2 (goal at most 1.3: met)" in printed[2]
    assert "peak memory 3000 MB (goal at most 2000: NOT met)" in printed[4]
    assert printed[6] == "0"


def test_who_has_no_turn_is_paused_with_all_its_processes() -> None:
    code = (
        "import subprocess, time\n"
        "from contenders.processes import descendants, pause, resume, state\n"
        "shell = subprocess.Popen(['sh', '-c', 'sleep 60 & wait'])\n"
        "while not (below := descendants(shell.pid)): time.sleep(0.01)\n"
        "family = (shell.pid, *below)\n"
        "def states(wanted):\n"
        "    end = time.monotonic() + 10\n"
        "    while (now := {state(one) for one in family}) != wanted and time.monotonic() < end:\n"
        "        time.sleep(0.01)\n"
        "    return now\n"
        "print(len(family), states({'S'}))\n"
        "pause(shell.pid)\n"
        "print(states({'T'}))\n"
        "resume(shell.pid)\n"
        "print(states({'S'}))\n"
        "for one in family: subprocess.run(['kill', str(one)])\n"
    )
    printed = printed_by(code)
    assert printed == ["2 {'S'}", "{'T'}", "{'S'}"]
