"""A process and all that it started: what they have used, and how to make them pause."""

import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """Return the processor time of this process, to the nanosecond, and of all below it.

    Those below are counted in ticks of the clock (10 ms), with children that have ended.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    below = sum(_ticks(pid) for pid in descendants()) / _TICK
    return time.process_time() + below + ended.ru_utime + ended.ru_stime


def megabytes() -> float:
    """Return the peak memory of this process; with others below it, the sum of what all hold now.

    Shared pages are divided among those that share them (proportional set size).
    """
    below = descendants()
    if not below:
        return _field(os.getpid(), "status", "VmHWM") / 1024
    return sum(_field(pid, "smaps_rollup", "Pss") for pid in (os.getpid(), *below)) / 1024


def pause(pid: int) -> None:
    """Stop a process and all below it, until `resume`."""
    _signal(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Let a process and all below it go on."""
    _signal(pid, signal.SIGCONT)


def descendants(of: int | None = None) -> list[int]:
    """Return the ids of all processes below one; by default this one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            parents.setdefault(int(stat[1]), []).append(int(entry.name))
    found, wave = [], [os.getpid() if of is None else of]
    while wave:
        wave = [child for pid in wave for child in parents.get(pid, [])]
        found += wave
    return found


def state(pid: int) -> str:
    """Return the kernel's letter for what a process does: S sleeps, T is stopped; "" is gone."""
    return (_stat(pid) or [""])[0]


def _signal(pid: int, number: signal.Signals) -> None:
    for one in (pid, *descendants(pid)):
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(one, number)


def _ticks(pid: int) -> int:
    """Return the ticks of a process and of its ended children."""
    stat = _stat(pid)
    return sum(map(int, stat[11:15])) if stat else 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/pid/stat from the state on; none of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _field(pid: int, file: str, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
