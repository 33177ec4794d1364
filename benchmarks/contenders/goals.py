"""What fedsim wants to be: ratios of time between two contenders, and whether they were reached."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """One contender's time for a client's round over another's.

    Attributes:
        clock: wall or processor.
        limit: the most that the ratio may be, or with `least` the least; None: there is no goal.
        why: what the ratio tells, where there is no goal.
    """

    model: str
    private: bool
    one: str
    other: str
    limit: float | None
    least: bool = False
    clock: str = "processor"
    clients: int | None = None
    why: str = ""

    def lines(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yield a line for each number of clients for which both were measured."""
        times: dict[int, dict[str, Row]] = {}
        for row in rows:
            if (row["model"], row["private"]) == (self.model, self.private):
                times.setdefault(row["clients"], {})[row["contender"]] = row
        for clients, by in times.items():
            if self.one not in by or self.other not in by or self.clients not in (None, clients):
                continue
            ratio = self._ratio(by[self.one], by[self.other])
            yield (
                f"{self.model}, {clients} clients, {'private' if self.private else 'not private'}: "
                f"{by[self.one]['name']} / {by[self.other]['name']} = {ratio:.2f} of {self.clock} "
                f"time ({self._verdict(ratio)})"
            )

    def _ratio(self, one: Row, other: Row) -> float:
        """Return the median over pairs of turns, which a machine's slow hours favour least."""
        turns = one.get(f"{self.clock}_turns", ()), other.get(f"{self.clock}_turns", ())
        if not turns[0] or len(turns[0]) != len(turns[1]):
            return one[self.clock] / other[self.clock]
        return statistics.median(a / b for a, b in zip(*turns, strict=True))

    def _verdict(self, ratio: float) -> str:
        if self.limit is None:
            return self.why
        met = ratio >= self.limit if self.least else ratio <= self.limit
        bound = f"at {'least' if self.least else 'most'} {self.limit:g}"
        return f"goal {bound}: {'met' if met else 'NOT met'}"


_GOALS = (
    Goal("mlp", True, "fedsim", "bare", 1.6, clients=50),
    Goal("cnn", True, "fedsim", "bare", 1.4, clients=50),
    Goal("mlp", False, "fedsim", "bare", 1.15, clients=50),
    Goal("cnn", False, "fedsim", "bare", 1.15, clients=50),
    Goal("mlp", True, "flower-opacus", "fedsim", 30, least=True, clock="wall"),
    Goal("cnn", True, "flower-opacus", "fedsim", 7, least=True, clock="wall"),
    Goal("mlp", False, "pfl", "fedsim", 1, least=True),
    Goal("cnn", False, "pfl", "fedsim", 1, least=True),
    Goal("small", True, "fedsim-alone", "fedsim", 5, least=True, clients=1000),
    Goal("cnn", True, "fedsim-ray-1", "fedsim-ray-2", 1.7, least=True, clock="wall"),
    Goal("cnn", True, "fedsim", "fedsim-apart", None, clock="wall", why="the machine's own limit"),
)


def goals(rows: Sequence[Row]) -> list[str]:
    """Return a line for each goal that the rows tell something about."""
    return [line for goal in _GOALS for line in goal.lines(rows)] + _scale(rows)


_MANY, _FEW = 10_000, 100
_MOST_SECONDS, _MOST_MEGABYTES, _MOST_GROWTH = 30.0, 2000.0, 1.3


def _scale(rows: Sequence[Row]) -> list[str]:
    """Return what many small clients cost: a round, its memory, and each beside one of few."""
    own = {
        row["clients"]: row
        for row in rows
        if (row["model"], row["private"], row["contender"]) == ("small", True, "fedsim")
    }
    if _MANY not in own:
        return []
    many = own[_MANY]
    figures = [
        ("a round", many["wall"] * _MANY, _MOST_SECONDS, " s"),
        ("peak memory", many["megabytes"], _MOST_MEGABYTES, " MB"),
    ]
    if _FEW in own:
        growth = many["processor"] / own[_FEW]["processor"]
        what = f"processor time of a client's round over that with {_FEW} clients"
        figures.append((what, growth, _MOST_GROWTH, ""))
    return [
        f"small, {_MANY} clients, private: {many['name']}: {what} {value:.4g}{unit} "
        f"(goal at most {limit:g}: {'met' if value <= limit else 'NOT met'})"
        for what, value, limit, unit in figures
    ]
