"""The comparison of two checkouts runs; its sizes here are too small for its numbers to count."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.slow  # real processes
def test_two_checkouts_take_turns(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    benchmarks: Path,
) -> None:
    out, here = tmp_path / "out.json", str(benchmarks.parent)
    options = ["versions.py", here, here, "--quick", "--modes", "plain", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", options)
    script("versions").main()
    record = json.loads(out.read_text())
    assert [(number["claim"], number["case"]) for number in record["numbers"]] == [
        ("not private: after / before", f"fedsim, 64-32-10, 3 clients, {clock} time")
        for clock in ("wall", "processor")
    ]
    assert all(number["value"] > 0 for number in record["numbers"])
    assert len(record["turns"][0]["before"]) == len(record["turns"][0]["after"]) == 1
