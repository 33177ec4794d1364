"""Measured numbers and their records: dated JSON files that `table.py` prints as tables.

Standard library alone: contenders in interpreters of their own import it, too.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

_VERSIONS = ("torch", "numpy", "scipy", "flwr", "ray", "opacus", "dp-accounting")


@dataclass(frozen=True)
class Number:
    """One measured number.

    Attributes:
        claim: what was measured, one row of a table.
        case: model, batch, clients: one cell of that row.
        value: median over turns; None: not measured yet.
        low, high: quartiles over turns; None: not recorded.
        unit: "x" is a ratio of times.
        goal: the most that `value` may be, or with `least` the least; None: no goal.
    """

    claim: str
    case: str
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str = "x"
    goal: float | None = None
    least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or a value."""
        if self.goal is None or self.value is None:
            return None
        return self.value >= self.goal if self.least else self.value <= self.goal

    def text(self) -> str:
        """Return value, quartiles and goal."""
        unit = "" if self.unit == "x" else f" {self.unit}"
        parts = []
        if self.low is not None and self.high is not None:
            parts.append(f"{_short(self.low)} to {_short(self.high)}")
        if self.goal is not None:
            verdict = {True: ", met", False: ", **missed**", None: ""}[self.met]
            parts.append(f"goal {'≥' if self.least else '≤'} {self.goal:g}{verdict}")
        value = "*to be measured*" if self.value is None else f"{_short(self.value)}{unit}"
        return value + (f" ({'; '.join(parts)})" if parts else "")

    def line(self) -> str:
        """Return the number as a line for a terminal."""
        return f"{self.claim}, {self.case}: {self.text().replace('*', '')}"


def over_turns(
    claim: str,
    case: str,
    values: Sequence[float],
    *,
    unit: str = "x",
    goal: float | None = None,
    least: bool = False,
) -> Number:
    """Return the median and the quartiles of one value a turn.

    Args:
        claim: as in `Number`, like the others.
        case: model, batch, clients.
        values: one a turn.
        unit: of the values.
        goal: the most that the median may be.
        least: whether the goal is the least.
    """
    low, middle, high = quartiles(values)
    return Number(claim, case, middle, low, high, unit, goal, least)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; NaN of no values."""
    if len(values) < 2:
        only = values[0] if values else float("nan")
        return only, only, only
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def pair_ratios(values: Iterable[float], base: Iterable[float]) -> list[float]:
    """Return the ratios of turns that are neighbours in time."""
    return [value / other for value, other in zip(values, base, strict=False)]


def machine() -> dict[str, object]:
    """Return what numbers depend on: processor, cores, system and versions."""
    info: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    processor = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in info:
        processor += f" (family {info['cpu family']}, model {info['model']})"
    return {
        "processor": processor,
        "avx512": "avx512f" in info.get("flags", "").split(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: found for name in _VERSIONS if (found := _version(name))},
    }


def machine_line() -> str:
    """Return the machine as a line for a terminal."""
    return ", ".join(f"{name} {value}" for name, value in machine().items())


def write_record(
    path: Path,
    script: str,
    numbers: Sequence[Number],
    details: Mapping[str, object] | None = None,
    *,
    extra_machine: Mapping[str, object] | None = None,
) -> None:
    """Write a dated record of numbers, with the command and the machine.

    Args:
        path: the JSON file.
        script: file name of the script.
        numbers: measured numbers.
        details: further content: rows, turns.
        extra_machine: further facts about the machine, such as its GPU.
    """
    content = {
        "script": script,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join([script, *_without_file(sys.argv[1:])]),
        "machine": {**machine(), **(extra_machine or {})},
        "numbers": [asdict(number) for number in numbers],
        **(details or {}),
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _without_file(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments without `--json FILE` and `--plot FILE`."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument not in ("--json", "--plot"):
            kept.append(argument)
        skip = argument in ("--json", "--plot")
    return kept


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _short(value: float) -> str:
    """Return three significant digits, and all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
