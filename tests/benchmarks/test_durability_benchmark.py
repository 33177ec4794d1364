"""The benchmark runs; what it measures is for people to read."""

import json
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest


@pytest.mark.slow
def test_the_benchmark_measures_every_contender(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Contenders are threads here, not processes, and the whole command takes a made-up minute."""
    durability, directories = script("durability"), []

    def started(directory: Path | None, checkpoints: bool) -> Connection:
        directories.append(directory)
        here, there = Pipe()
        Thread(target=durability.serve, args=(directory, checkpoints, there), daemon=True).start()
        here.recv()
        return here

    def rounds(rounds: int, base: Path) -> dict[str, float]:
        return measure(rounds, tmp_path)

    measure = durability.measure
    monkeypatch.setattr(durability, "measure", rounds)
    monkeypatch.setattr(durability, "_started", started)
    monkeypatch.setattr(durability, "_command", lambda base: 60.0)
    monkeypatch.setattr(sys, "argv", ["durability.py", "--quick", "--json"])
    durability.main()
    found = json.loads(capsys.readouterr().out)
    assert {"nothing on disk", "ledger and checkpoint, ratio", "checkpoint alone"} <= set(found)
    assert all(found[name] > 0 for name in found if not name.startswith("overhead"))
    assert directories == [None, tmp_path / "ledger", tmp_path / "both"]
    charged = [len((path / "ledger.jsonl").read_text().splitlines()) for path in directories[1:]]
    assert charged == [4 * 10, 4 * 10], "four rounds of ten clients"
    assert not (tmp_path / "ledger" / "checkpoint" / "model.safetensors").exists()
    assert (tmp_path / "both" / "checkpoint" / "model.safetensors").exists()
