"""The benchmark of the accountant runs; its sizes here are too small for its numbers to count."""

import json
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.slow
def test_it_runs_and_prints_every_case(
    script: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    script("accountant").main(["--quick", "--json"])
    printed = capsys.readouterr().out
    for case in "abcde":
        assert f"\n({case}) " in printed
    record = json.loads(printed.splitlines()[-1])
    ratios = [row["ratio"] for case in record["cases"] for row in case["contenders"]]
    assert all(ratio > 0.0 for ratio in ratios)
