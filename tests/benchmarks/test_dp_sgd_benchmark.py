"""The benchmark runs; what it measures is for people to read."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.slow  # no guarantee rests on it
def test_the_benchmark_prints_ratios(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["dp_sgd.py", "--quick"])
    script("dp_sgd").main()
    printed = capsys.readouterr().out
    for title in ("MLP, batch 16", "small CNN, batch 16", "large CNN, batch 16", "10 clients"):
        assert title in printed
    assert "fedsim, cohort" in printed
