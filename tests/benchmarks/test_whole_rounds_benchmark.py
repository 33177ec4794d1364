"""The benchmark of whole rounds: every kind of correlated noise beside independent noise."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_rounds_of_every_kind_are_timed_beside_independent_noise(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    benchmark, out, noise = script("whole_rounds"), tmp_path / "out.json", list[object]()
    run = benchmark._run

    def noted(source: object, keys: dict[str, object]) -> object:
        noise.append(keys["privacy.noise_correlation"])
        return run(source, keys)

    monkeypatch.setattr(benchmark, "_run", noted)
    monkeypatch.setattr(sys, "argv", ["whole_rounds.py", "--quick", "--json", str(out)])
    benchmark.main()
    kinds = ["identity", "tree", "blt", "toeplitz"]
    numbers = json.loads(out.read_text())["numbers"]
    assert [number["case"].split(", ")[0] for number in numbers] == kinds
    assert all(number["value"] > 0 and number["goal"] == 1.3 for number in numbers)
    assert noise == ["none", *kinds[:3], {"name": "toeplitz", "bands": 128}]
