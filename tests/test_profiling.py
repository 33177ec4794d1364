"""The profile says where the time went, in the format of speedscope."""

import json
import time
from pathlib import Path

import pytest

from fedsim.profiling import profile_to


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def work() -> None:
    busy(0.4)


def test_it_finds_who_took_the_time(tmp_path: Path) -> None:
    with profile_to(tmp_path / "p.json", name="test"):
        work()
    content = json.loads((tmp_path / "p.json").read_text())
    frames, (profile,) = content["shared"]["frames"], content["profiles"]
    assert profile["type"] == "sampled"
    assert len(profile["samples"]) == len(profile["weights"])
    assert profile["endValue"] == pytest.approx(sum(profile["weights"]))
    inside = 0.0
    for stack, weight in zip(profile["samples"], profile["weights"], strict=True):
        names = [frames[index]["name"] for index in stack]
        if "busy" in names:
            assert names.index("work") < names.index("busy"), "outermost first"
            inside += weight
    assert inside > 0.3


def test_it_is_written_when_the_run_fails(tmp_path: Path) -> None:
    def failing() -> None:
        with profile_to(tmp_path / "p.json", name="test"):
            busy(0.05)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        failing()
    assert json.loads((tmp_path / "p.json").read_text())["profiles"][0]["samples"]


def test_nothing_happens_unless_asked() -> None:
    with profile_to(None, name="test"):
        busy(0.01)
