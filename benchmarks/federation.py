"""Rounds of a federation on fedsim and on others, beside the bare loop that is the limit.

    python benchmarks/federation.py --json out.json --plot out.svg
    python benchmarks/federation.py --contenders fedsim pfl --json out.json --plot out.svg

Each contender is a process of its own, on one thread for each worker; they take turns, round by
round, so that a busy machine disturbs all alike. Wall time and processor time (with all processes
that a contender started) are both measured, and ratios are medians over neighbours in time, against
the bare loop. Who is not installed is left out, and said so; who would take hours does a part of
the work, and the rest is scaled, and marked with ~. By default 10 to 10,000 clients of two models
are measured, in about ten minutes on two cores that do nothing else. `--goals` measures the cases
that have a goal, and no others.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path

from contenders import CONTENDERS
from contenders.base import SHAPES, Work
from contenders.goals import GOALS, goal_numbers
from contenders.stage import LeftOutError, Stage
from records import machine_line, pair_ratios, quartiles, write_record

LEAST_TURN_SECONDS = 0.1  # shorter rounds are done several at once
_COPIES = 4  # of the data that a contender may hold while it gets ready
_FEWEST_TURNS = 2
# Rounds of more would only take longer, and their data would not fit (9 GB of 10,000 MLP clients).
_MOST_CLIENTS = {"mlp": 300, "cnn": 200, "builtin-cnn": 100}


@dataclass(frozen=True)
class Row:
    """One contender's result.

    Attributes:
        wall, processor: seconds of a client's round, medians over the turns.
        wall_ratio, processor_ratio: lower quartile, median and upper quartile of the same over the
            bare loop's, turn by turn.
        megabytes: peak memory of one process; of several, what they held together after a round.
        timed_clients: clients of the rounds that were timed; fewer than `clients` if scaled.
        wall_turns, processor_turns: seconds of a client's round in each turn.
    """

    model: str
    clients: int
    private: bool
    contender: str
    name: str
    wall: float
    processor: float
    wall_ratio: tuple[float, float, float]
    processor_ratio: tuple[float, float, float]
    megabytes: float
    timed_clients: int
    wall_turns: tuple[float, ...]
    processor_turns: tuple[float, ...]

    def line(self) -> str:
        """Return the row for people."""
        scaled = f"  ~ scaled from {self.timed_clients} clients"
        return (
            f"  {self.name:<34} {1 / self.wall:9.0f} /s  {self.wall_ratio[1]:8.2f} x  "
            f"{self.processor * 1e3:9.3f} ms of processor {self.processor_ratio[1]:8.2f} x  "
            f"{self.megabytes:6.0f} MB" + (scaled if self.timed_clients < self.clients else "")
        )


def part_of(work: Work, key: str) -> Work:
    """Return the work that a contender really does of some work."""
    entry = CONTENDERS[key]
    limits = entry.most_clients, _MOST_CLIENTS.get(work.model) if entry.device == "cpu" else None
    most = min((limit for limit in limits if limit is not None), default=work.clients)
    return replace(work, clients=min(work.clients, most))


def measure(
    work: Work, keys: Iterable[str], turns: int, seconds: float, *, base: str = "bare"
) -> list[Row]:
    """Return a row for each contender that can take part.

    Args:
        work: what a round is.
        keys: who takes part.
        turns: timed turns of each.
        seconds: after so many no further turns are begun, once there are a few.
        base: the contender that ratios are taken to.
    """
    with ExitStack() as open_stages:
        stages: dict[str, tuple[Stage, Work, int]] = {}
        started = {}
        for key in keys:
            own = part_of(work, key)
            if work.private not in CONTENDERS[key].modes:
                continue
            if own.megabytes * _COPIES > _free_megabytes():
                print(f"  {key} is left out: its data, {own.megabytes:.0f} MB, do not fit")
                continue
            try:
                started[key] = open_stages.enter_context(Stage(key, own)), own
            except LeftOutError as reason:
                print(f"  {key} is left out: {reason}")
        for key, (stage, own) in started.items():
            try:
                stage.wait()
            except LeftOutError as reason:
                print(f"  {key} is left out: {reason}")
                continue
            took = stage.rounds(1)["wall"]  # warms up
            if took < 1.0:
                took = stage.rounds(1)["wall"]
            stages[key] = stage, own, max(1, ceil(LEAST_TURN_SECONDS / took))
        seen: dict[str, list[tuple[float, float]]] = {key: [] for key in stages}
        memory = dict.fromkeys(stages, 0.0)
        begin = time.perf_counter()
        for turn in range(turns):
            if turn >= _FEWEST_TURNS and time.perf_counter() - begin > seconds:
                break
            for key, (stage, own, rounds) in stages.items():
                took = stage.rounds(rounds)
                done = own.clients * rounds
                seen[key].append((took["wall"] / done, took["processor"] / done))
                memory[key] = max(memory[key], took["megabytes"])
    limit = seen.get(base, [])
    return [
        Row(
            **asdict(work),
            contender=key,
            name=stage.name,
            wall=statistics.median(wall for wall, _ in seen[key]),
            processor=statistics.median(processor for _, processor in seen[key]),
            wall_ratio=_ratio([w for w, _ in seen[key]], [w for w, _ in limit]),
            processor_ratio=_ratio([p for _, p in seen[key]], [p for _, p in limit]),
            megabytes=memory[key],
            timed_clients=own.clients,
            wall_turns=tuple(wall for wall, _ in seen[key]),
            processor_turns=tuple(processor for _, processor in seen[key]),
        )
        for key, (stage, own, _) in stages.items()
    ]


def same(rows: list[Row], work: Work, key: str) -> Row | None:
    """Return the row of a contender that has already done the part that it does of some work."""
    part = part_of(work, key)
    case = (part.model, part.private, key)
    return next(
        (
            row
            for row in rows
            if (row.model, row.private, row.contender) == case
            and row.timed_clients == part.clients < work.clients
        ),
        None,
    )


def _ratio(values: list[float], base: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios of neighbours in time; NaN without a base."""
    return quartiles(pair_ratios(values, base))


def _free_megabytes() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


def plot(rows: list[Row], path: Path) -> None:
    """Draw client-rounds per second over the number of clients, a panel for each model and mode."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys((row.model, row.private) for row in rows))
    figure, panels = plt.subplots(1, len(kinds), figsize=(4.2 * len(kinds), 3.8), squeeze=False)
    for panel, (model, private) in zip(panels[0], kinds, strict=True):
        own = [row for row in rows if (row.model, row.private) == (model, private)]
        for name in dict.fromkeys(row.name for row in own):
            points = sorted((row.clients, 1 / row.wall) for row in own if row.name == name)
            panel.loglog(*zip(*points, strict=True), marker="o", label=name)
        title = f"{model}, {'DP' if private else 'no privacy'}"
        panel.set(title=title, xlabel="clients", ylabel="client-rounds per second")
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a script that measures rounds: turns, seconds, --quick, --json.

    Args:
        description: of the script.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--modes", nargs="+", choices=["private", "plain"], default=["private", "plain"]
    )
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each contender")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for the turns of a case, if there are a few"
    )
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write numbers, rows and machine")
    return parser


def options_of_main() -> argparse.Namespace:
    """Return the options of this script."""
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["mlp", "small"])
    names = [key for key, entry in CONTENDERS.items() if entry.device == "cpu"]
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    parser.add_argument("--goals", action="store_true", help="the cases that have a goal")
    parser.add_argument("--pfl-python", help="interpreter of pfl-research (or PFL_PYTHON)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows")
    options = parser.parse_args()
    if options.pfl_python:
        os.environ["PFL_PYTHON"] = options.pfl_python
    if options.quick:
        options.clients, options.models, options.turns = [3], ["small"], 1
    return options


def cases(options: argparse.Namespace) -> dict[Work, list[str]]:
    """Return each case and its contenders.

    Args:
        options: of the command line.
    """
    modes = [mode == "private" for mode in options.modes]
    if not options.goals:
        works = [
            Work(model, clients, private)
            for model in options.models
            for clients in options.clients
            for private in modes
        ]
        return {work: options.contenders for work in works}
    found: dict[Work, set[str]] = {}
    for goal in GOALS:
        if goal.private in modes and goal.limit is not None:
            work = Work(goal.model, goal.clients or 50, goal.private)
            found.setdefault(work, set()).update((goal.one, goal.other))
    if True in modes:
        found[Work("small", 10_000, True)] = {"fedsim"}
        found[Work("small", 100, True)] = {"fedsim"}
    return {
        work: [key for key in CONTENDERS if key in keys and key in options.contenders]
        for work, keys in found.items()
    }


def main() -> None:
    """Measure what the command line asks for and print it."""
    options = options_of_main()
    print(machine_line())
    rows: list[Row] = []
    for work, keys in cases(options).items():
        privacy = "private" if work.private else "not private"
        print(f"{work.model}, {work.clients} clients, {privacy}")
        known = {key: row for key in keys if (row := same(rows, work, key))}
        others = [key for key in keys if key not in known]
        found = measure(work, others, options.turns, options.seconds)
        found += [replace(row, clients=work.clients) for row in known.values()]
        rows += found
        for row in found:
            print(row.line(), flush=True)
        numbers = goal_numbers([asdict(row) for row in rows])
        if options.json:
            details = {"rows": [asdict(row) for row in rows]}
            write_record(options.json, "federation.py", numbers, details)
    for number in goal_numbers([asdict(row) for row in rows]):
        print(number.line())
    if options.plot and rows:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
