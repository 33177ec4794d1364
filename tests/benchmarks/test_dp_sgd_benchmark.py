"""The benchmark runs; what it measures is for people to read."""

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.slow  # no guarantee rests on it
def test_the_benchmark_prints_and_writes_ratios(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out, dp_sgd = tmp_path / "out.json", script("dp_sgd")
    monkeypatch.delitem(dp_sgd.MODELS, "large CNN")
    monkeypatch.delitem(dp_sgd.BLOCKS, "cnn")
    monkeypatch.setattr(sys, "argv", ["dp_sgd.py", "--quick", "--json", str(out)])
    dp_sgd.main()
    printed = capsys.readouterr().out
    numbers = json.loads(out.read_text())["numbers"]
    for case in ("MLP, batch 16", "small CNN, batch 16"):
        claims = {number["claim"] for number in numbers if number["case"] == case}
        assert "private step in the federation / plain SGD" in claims
        assert "private step through PrivacyEngine.attach / plain SGD" in claims
    blocks = {number["case"] for number in numbers if "in one block" in number["claim"]}
    assert {"MLP, K = 1", "64-32-10, K = 32"} <= blocks
    assert all(number["low"] <= number["value"] <= number["high"] for number in numbers)
    assert all(number["claim"] in printed for number in numbers)


def test_steps_go_through_the_entry_point_of_blocks(benchmarks: Path) -> None:
    """What is measured is what a federation runs, not a layer below it."""
    tree = ast.parse((benchmarks / "dp_sgd.py").read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "fedsim.clients.training.block" in imported
    assert not [name for name in imported if name.startswith("fedsim.clients.gradients")]
