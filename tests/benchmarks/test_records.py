"""Records of measurements, and the tables that README.md shows of them."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LINES = 80


def record(
    date: str, *numbers: dict[str, Any], script: str = "a.py", processor: str = "P (model 1)"
) -> dict[str, Any]:
    machine = {"processor": processor, "avx512": True, "cores": 2}
    command = f"{script} --now"
    return {
        "script": script,
        "date": date,
        "command": command,
        "machine": machine,
        "numbers": list(numbers),
    }


def number(value: float | None, case: str = "MLP", **more: Any) -> dict[str, Any]:
    return {"claim": "private / plain", "case": case, "value": value, **more}


def test_the_readme_shows_what_the_records_say(
    script: Callable[[str], ModuleType], benchmarks: Path
) -> None:
    """Run `python benchmarks/table.py --readme benchmarks/results/*.json` after a measurement."""
    table, readme = script("table"), (benchmarks / "README.md").read_text()
    content = table.tables(table.read_records(list((benchmarks / "results").glob("*.json"))))
    assert readme == table.with_tables(readme, content)
    assert len(readme.splitlines()) <= LINES


def test_the_newest_number_of_a_case_counts(script: Callable[[str], ModuleType]) -> None:
    old = record(
        "2026-01-01", number(2.0, low=1.9, high=2.1, goal=1.5), number(3.0, "CNN", goal=4.0)
    )
    new = record("2026-01-02", number(1.4, low=1.3, high=1.5, goal=1.5))
    lines = script("table").tables([old, new]).splitlines()
    where = "P (model 1), AVX-512, 2 cores, 2026-01"
    assert lines[2:] == [
        "| private / plain "
        f"| MLP: 1.4 (1.3 to 1.5; goal ≤ 1.5, met) — `a.py --now`, {where}-02"
        f"<br>CNN: 3 (goal ≤ 4, met) — `a.py --now`, {where}-01 |",
    ]


def test_each_maker_of_processors_keeps_its_number(script: Callable[[str], ModuleType]) -> None:
    first, again = (
        record("2026-01-01", number(2.0), processor="A (model 1)"),
        record("2026-01-02", number(3.0), processor="A (model 2)"),
    )
    other = record("2026-01-03", number(4.0), processor="B (model 1)")
    (line,) = script("table").tables([first, again, other]).splitlines()[2:]
    assert "MLP: 3 — `a.py --now`, A (model 2)" in line
    assert "<br>MLP: 4 — `a.py --now`, B (model 1)" in line
    assert "MLP: 2" not in line


def test_a_new_goal_judges_the_last_known_number(script: Callable[[str], ModuleType]) -> None:
    known, goals = record("2026-01-01", number(1.4, goal=1.5)), number(None, goal=1.2)
    pending = record("2026-01-02", goals, number(None, "CNN", goal=2.0, least=True))
    printed = script("table").tables([known, pending])
    assert "MLP: 1.4 (goal ≤ 1.2, **missed**) — `a.py --now`, P (model 1), AVX-512" in printed
    assert "CNN" not in printed
    assert "`a.py` (" in script("table").tables([pending])
    assert script("table").tables([pending]).endswith("): not measured yet.")


def test_numbers_without_a_goal_are_shown_where_a_script_has_none(
    script: Callable[[str], ModuleType],
) -> None:
    table, free = script("table"), number(3.0, "CNN")
    assert "CNN: 3 — `a.py --now`" in table.tables([record("2026-01-01", free)])
    assert "CNN" not in table.tables([record("2026-01-01", free, number(1.0, goal=1.5))])


def test_records_are_read_by_date_and_not_by_name(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    for name, date in (("b", "2026-01-01"), ("a", "2026-01-02")):
        (tmp_path / f"{name}.json").write_text(json.dumps(record(date)))
    found = script("table").read_records([tmp_path / "a.json", tmp_path / "b.json"])
    assert [one["date"] for one in found] == ["2026-01-01", "2026-01-02"]


def test_a_record_holds_command_machine_and_quartiles(
    benchmarks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = import_module("records")
    monkeypatch.setattr("sys.argv", ["x.py", "--quick", "--json", "out.json", "--turns", "3"])
    ratio = records.over_turns("a / b", "MLP", [1.0, 2.0, 3.0, 4.0, 5.0], goal=3.0)
    assert (ratio.low, ratio.value, ratio.high, ratio.met) == (2.0, 3.0, 4.0, True)
    records.write_record(tmp_path / "out.json", "x.py", [ratio], {"rows": []})
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["command"] == "x.py --quick --turns 3"
    assert content["machine"]["cores"] >= 1
    assert content["numbers"][0]["value"] == 3.0
    assert content["rows"] == []
