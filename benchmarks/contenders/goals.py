"""Goals of federations: ratios of time between two contenders, and the scale of a round."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from records import Number, over_turns, pair_ratios

Row = Mapping[str, Any]

NAMES = {
    "mlp": "MLP",
    "cnn": "benchmark CNN",
    "builtin-cnn": "built-in cnn",
    "small": "64-32-10",
}


@dataclass(frozen=True)
class Goal:
    """One contender's time for a client's round over another's.

    Attributes:
        model, private: the work.
        one, other: the contenders.
        limit: the most that the ratio may be, or with `least` the least; None: no goal.
        least: whether `limit` is the least.
        clock: wall or processor.
        clients: number of clients of the goal; None: any.
    """

    model: str
    private: bool
    one: str
    other: str
    limit: float | None
    least: bool = False
    clock: str = "processor"
    clients: int | None = None

    def numbers(self, rows: Sequence[Row]) -> Iterator[Number]:
        """Yield the ratio for each number of clients for which both were measured."""
        times: dict[int, dict[str, Row]] = {}
        for row in rows:
            if (row["model"], row["private"]) == (self.model, self.private):
                times.setdefault(row["clients"], {})[row["contender"]] = row
        for clients, by in times.items():
            if self.one in by and self.other in by and self.clients in (None, clients):
                ratios = turn_ratios(by[self.one], by[self.other], self.clock)
                yield over_turns(*self.names(clients), ratios, goal=self.limit, least=self.least)

    def names(self, clients: int) -> tuple[str, str]:
        """Return claim and case."""
        privacy = "private" if self.private else "not private"
        claim = f"{privacy}: {self.one} / {self.other}, {self.clock} time"
        return claim, f"{NAMES[self.model]}, {clients:,} clients"


def turn_ratios(one: Row, other: Row, clock: str) -> list[float]:
    """Return the ratios of turns that are neighbours in time, which slow hours favour least.

    Args:
        one: row of a contender.
        other: row of the contender that it is compared with.
        clock: wall or processor.
    """
    turns = one.get(f"{clock}_turns", ()), other.get(f"{clock}_turns", ())
    if not turns[0] or len(turns[0]) != len(turns[1]):
        return [one[clock] / other[clock]]
    return pair_ratios(*turns)


# With one worker and two that share nothing, the ratio is the machine's own limit: no goal.
GOALS = (
    Goal("mlp", True, "fedsim", "bare", 1.4, clients=50),
    Goal("mlp", True, "fedsim", "bare", 1.4, clients=200),
    Goal("cnn", True, "fedsim", "bare", 0.95, clients=50),
    Goal("builtin-cnn", True, "fedsim", "bare", 1.15, clients=50),
    Goal("small", True, "fedsim", "bare", 0.17, clients=1000),
    Goal("mlp", False, "fedsim", "bare", 1.0, clients=50),
    Goal("mlp", False, "fedsim", "bare", 1.0, clients=200),
    Goal("cnn", False, "fedsim", "bare", 1.0, clients=50),
    Goal("builtin-cnn", False, "fedsim", "bare", 1.0, clients=50),
    Goal("small", False, "fedsim", "bare", 1.0, clients=1000),
    Goal("mlp", True, "flower-opacus", "fedsim", 30, least=True, clock="wall"),
    Goal("cnn", True, "flower-opacus", "fedsim", 7, least=True, clock="wall"),
    Goal("mlp", False, "pfl", "fedsim", 1, least=True),
    Goal("cnn", False, "pfl", "fedsim", 1, least=True),
    Goal("small", True, "fedsim-alone", "fedsim", 5, least=True, clients=1000),
    Goal("mlp", True, "fedsim-ray-1", "fedsim-ray-2", 1.7, True, "wall", 200),
    Goal("cnn", True, "fedsim-ray-1", "fedsim-ray-2", 1.7, True, "wall", 200),
    Goal("mlp", True, "fedsim", "fedsim-apart", None, clock="wall"),
    Goal("cnn", True, "fedsim", "fedsim-apart", None, clock="wall"),
)

_MANY, _FEW = 10_000, 100
_MAX_SECONDS, _MAX_MEGABYTES, _MAX_GROWTH = 1.2, 450.0, 1.3


def goal_numbers(rows: Sequence[Row]) -> list[Number]:
    """Return the number of each goal that the rows decide, and those of a large round."""
    return [number for goal in GOALS for number in goal.numbers(rows)] + _scale(rows)


def _scale(rows: Sequence[Row]) -> list[Number]:
    """Return time and memory of a round of many small clients, and their growth."""
    own = {
        row["clients"]: row
        for row in rows
        if (row["model"], row["private"], row["contender"]) == ("small", True, "fedsim")
    }
    if _MANY not in own:
        return []
    many, claim = own[_MANY], f"private: a round of {_MANY:,} clients (64-32-10), fedsim"
    seconds = [wall * _MANY for wall in many.get("wall_turns") or (many["wall"],)]
    found = [
        over_turns(claim, "time", seconds, unit="s", goal=_MAX_SECONDS),
        Number(claim, "peak memory", many["megabytes"], unit="MB", goal=_MAX_MEGABYTES),
    ]
    if _FEW in own:
        growth = many["processor"] / own[_FEW]["processor"]
        case = f"processor time of a client's round over that among {_FEW}"
        found.append(Number(claim, case, growth, goal=_MAX_GROWTH))
    return found
