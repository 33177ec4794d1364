"""Phases are announced in order, timed, and closed once."""

from fedsim.core.commands import Phases


def test_phases_are_announced_and_timed():
    announced: list[str] = []
    phases = Phases(announced.append)
    phases.end()
    for name in ("load", "check", "load"):
        phases.begin(name)
    assert list(phases.seconds) == ["load", "check"]
    before = phases.seconds["load"]
    phases.end()
    phases.end()
    assert announced == ["load", "check", "load", ""]
    assert phases.seconds["load"] >= before > 0.0
