"""The benchmark of GPUs runs where there is none, and says what is missing."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.mark.long  # real processes; test_federation_benchmark.py has the CPU's
def test_it_measures_the_cpu_and_names_what_is_missing(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "gpu.json"
    options = ["gpu.py", "--quick", "--modes", "private", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", options)
    script("gpu").main()
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    measured = {row["contender"] for row in record["rows"]}
    assert {"bare", "fedsim"} <= measured
    if not torch.cuda.is_available():
        assert measured == {"bare", "fedsim"}
        for key in ("bare-cuda", "fedsim-cuda"):
            assert f"{key} is left out: no GPU" in printed
    rates = {n["case"] for n in record["numbers"] if n["unit"] == "/s"}
    assert rates == {f"{key}, MLP, 3 clients" for key in measured}
