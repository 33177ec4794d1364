"""The benchmark runs; docs/explain/scale.md shows the figures of its records."""

import io
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType, SimpleNamespace

import pytest


@pytest.mark.slow
def test_the_benchmark_measures_a_run_of_each_size(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the command of each run performed in this process."""
    record, scale = tmp_path / "r.json", script("scale")

    def here(command: Sequence[str], **_: object) -> CompletedProcess[str]:
        out = io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out):
            patch.setattr(sys, "argv", command[1:])
            scale.main()
        return CompletedProcess(command, 0, out.getvalue())

    monkeypatch.setattr(scale, "subprocess", SimpleNamespace(run=here))
    monkeypatch.setattr(sys, "argv", ["scale.py", "--quick", "--json", str(record)])
    scale.main()
    found = json.loads(record.read_text())
    assert set(found["runs"]) == {"4", "8", "12"}
    cases = {number["case"] for number in found["numbers"]}
    assert cases == {
        "among 8 over among 4",
        "among 12 over among 4",
        "above 4 clients, to 8",
        "above 8 clients, to 12",
    }
    for one in (each for runs in found["runs"].values() for each in runs):
        assert all(value > 0 for value in one.values() if isinstance(value, float))
        assert len(one["round"]) == len(one["round_wall"]) == 1


@pytest.mark.slow
def test_every_part_is_measured(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record, parts = tmp_path / "r.json", script("scale_parts")
    monkeypatch.setattr(parts, "PARTICIPANTS", 50)
    monkeypatch.setattr(parts, "KINDS", 5)
    monkeypatch.setattr(sys, "argv", ["scale_parts.py", "--quick", "--json", str(record)])
    parts.main()
    found = json.loads(record.read_text())
    assert found["parts"].keys() == parts.PARTS.keys()
    assert len(found["numbers"]) == len(parts.PARTS)


def test_the_page_has_the_figures_of_the_records(
    script: Callable[[str], ModuleType], benchmarks: Path
) -> None:
    page = (benchmarks.parent / "docs" / "explain" / "scale.md").read_text()
    records = sorted((benchmarks / "results").glob("*-scale*.json"))
    contents = [json.loads(record.read_text()) for record in records]
    found = [record for record in contents if len(record.get("runs", record.get("parts", ()))) > 1]
    assert {record["script"] for record in found} == {"scale.py", "scale_parts.py"}
    for record in found:
        assert script(record["script"].removesuffix(".py")).table_of(record) in page
