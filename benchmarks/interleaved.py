"""Timing of contenders side by side: interleaved, so that a noisy machine disturbs all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call of a contender.

    Attributes:
        median, best: over the turns.
        turns: one value a turn.
    """

    median: float
    best: float
    turns: tuple[float, ...] = ()


def measure(
    contenders: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    calls: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Return the time of one call of each contender.

    Args:
        contenders: what to call, by name.
        repetitions: how many times each contender has its turn.
        calls: calls in one turn; a turn's time is divided by it.
        clock: gives seconds; `time.process_time` leaves out what other processes do.
    """
    for contender in contenders.values():
        contender()
        contender()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repetitions):
        for name, contender in contenders.items():
            start = clock()
            for _ in range(calls):
                contender()
            times[name].append((clock() - start) * 1e3 / calls)
    return {
        name: Timing(statistics.median(values), min(values), tuple(values))
        for name, values in times.items()
    }


def print_ratios(title: str, timings: Mapping[str, Timing], *, baseline: str) -> None:
    """Print each contender's time and its ratio to the baseline, by median and by best."""
    print(title)
    base = timings[baseline]
    for name, timing in timings.items():
        ratios = timing.median / base.median, timing.best / base.best
        print(
            f"  {name:<24} {timing.median:9.3f} ms   "
            f"{ratios[0]:6.2f} x (median)  {ratios[1]:6.2f} x (best)"
        )
