"""The profile says where the time went, in the format of speedscope."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedsim.profiling
from fedsim.profiling import profile_to


class Clock:
    """A clock that advances by a hundredth of a second at every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.01
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The profiler's clock; only the profiler looks at it."""
    clock = Clock()
    monkeypatch.setattr(fedsim.profiling, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def busy(clock: Clock, seconds: float) -> None:
    end = clock.now + seconds
    while clock.now < end:
        pass


def work(clock: Clock) -> None:
    busy(clock, 0.4)


def test_it_finds_who_took_the_time(tmp_path: Path, clock: Clock) -> None:
    with profile_to(tmp_path / "p.json", name="test"):
        work(clock)
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


def test_it_is_written_when_the_run_fails(tmp_path: Path, clock: Clock) -> None:
    def failing() -> None:
        with profile_to(tmp_path / "p.json", name="test"):
            busy(clock, 0.05)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        failing()
    assert json.loads((tmp_path / "p.json").read_text())["profiles"][0]["samples"]


def test_nothing_happens_unless_asked(clock: Clock) -> None:
    with profile_to(None, name="test"):
        pass
    assert clock.now == 0.0
