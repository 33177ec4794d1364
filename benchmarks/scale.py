"""Whole runs of 1,000 to 100,000 clients, of which each round asks the same number.

    python benchmarks/scale.py --json out.json
    python benchmarks/scale.py --clients 100000 --participants 1000 --json out.json    # 1 % a round

A run is a process of its own on one thread; runs of all sizes take turns. A client has 16 examples
of 32 values, and its round is 4 private steps of batch 8 (32-32-10), towards ε = 8. The run is
interrupted before its last round, resumed, and verified. Processor time is that of the process, so
a busy machine disturbs it less. Of the rounds the median counts, without the first one.

What a client costs must not grow with the number of clients: the time of its round, and its part of
the memory and of the time of the run. `--table RECORD` prints the figures of a record as
docs/explain/scale.md has them.
"""

import argparse
import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from records import Number, machine_line, over_turns, pair_ratios, write_record

EXAMPLES, INPUTS, CLASSES, TEST_EXAMPLES = 16, 32, 10, 2000  # of a client; of a test set
PARTICIPANTS = 500  # of every round: fewer than the fewest clients, so every run samples
SIZES = (1000, 10_000, 100_000)
FLAT = 1.2  # most that a further client may cost over an earlier one

_PLUG_IN = """
import numpy as np
from pathlib import Path

HERE = Path(__file__).parent

def load(seed=0):
    return tuple(np.load(HERE / f"{name}.npy") for name in ("x", "y", "x_test", "y_test"))
"""


@dataclass(frozen=True)
class Plan:
    """What all runs of a measurement have in common.

    Attributes:
        participants: clients of a round.
        rounds: rounds of a run, at least 3.
        partition: iid, or quantity for clients of different sizes.
    """

    participants: int
    rounds: int
    partition: str

    def experiment(self, clients: int) -> dict[str, Any]:
        """Return the experiment of some clients."""
        least = {} if self.partition == "iid" else {"min_examples": EXAMPLES // 2}
        per_round = min(clients, self.participants)
        return {
            "name": "scale",
            "data": {
                "dataset": "./plugin.py:load",
                "partition": {"scheme": self.partition, "num_clients": clients, **least},
            },
            "model": {"name": "mlp", "args": {"hidden": [32]}},
            "federation": {"rounds": self.rounds, "clients_per_round": per_round},
            "local": {"steps": 4, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
            "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
        }

    @property
    def arguments(self) -> list[str]:
        """The options of a child process."""
        fields = asdict(self).items()
        return [text for name, value in fields for text in (f"--{name}", str(value))]


@dataclass(frozen=True)
class Figures:
    """One run of some clients; seconds are processor time unless named otherwise.

    Attributes:
        clients: number of clients.
        setup: until the first round.
        round_wall, round: seconds of each round but the first.
        results: after the last round of the first part, the report included.
        resume: from the start of the resumed run until its round.
        verify: of `fedsim verify`.
        data_mb: bytes of all examples.
        live_mb, peak_mb: memory in use after the rounds, and the largest until the report.
        report_mb, privacy_mb, run_mb: size of the report, of privacy.json and of the run directory.
    """

    clients: int
    setup: float
    round_wall: tuple[float, ...]
    round: tuple[float, ...]
    results: float
    resume: float
    verify: float
    data_mb: float
    live_mb: float
    peak_mb: float
    report_mb: float
    privacy_mb: float
    run_mb: float


@dataclass
class Clock:
    """An observer that notes when a run begins its rounds and ends each of them.

    Attributes:
        last: interrupt the run after this round; None: never.
        marks: wall and processor seconds at the beginning and after each round.
        live_mb: memory in use after the last round.
    """

    last: int | None = None
    marks: list[tuple[float, float]] = field(default_factory=list)
    live_mb: float = 0.0

    def started(self, federation: object, path: Path) -> None:
        """Note the beginning of the rounds."""
        self.marks.append(now())

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Note the end of a round."""
        self.marks.append(now())
        if row["round"] == self.last:
            self.live_mb = live_mb()
            raise KeyboardInterrupt

    def ended(self) -> None:
        """Nothing is noted."""


def now() -> tuple[float, float]:
    """Return the wall clock and the processor time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def write_data(folder: Path, clients: int) -> None:
    """Write the examples of some clients, and a data set function that reads them.

    Args:
        folder: receives plugin.py and the arrays.
        clients: number of clients.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    centres = 0.6 * generator.standard_normal((CLASSES, INPUTS), dtype=np.float32)
    for suffix, count in (("", clients * EXAMPLES), ("_test", TEST_EXAMPLES)):
        classes = generator.integers(CLASSES, size=count)
        inputs = generator.standard_normal((count, INPUTS), dtype=np.float32)
        inputs += centres[classes]
        np.save(folder / f"x{suffix}.npy", inputs)
        np.save(folder / f"y{suffix}.npy", classes)
    (folder / "plugin.py").write_text(_PLUG_IN)


def run(folder: Path, clients: int, plan: Plan) -> Figures:
    """Run, resume and verify a federation in this process, and return its figures.

    Args:
        folder: has the data; receives the run.
        clients: number of clients.
        plan: of the measurement.
    """
    from fedsim.report.html import write_report
    from fedsim.runs.directory import RunDirectory
    from fedsim.runs.runner import run_experiment
    from fedsim.runs.verification import verify_run

    experiment, out = plan.experiment(clients), folder / "run"
    clock, begin = Clock(last=plan.rounds - 1), now()
    run_experiment(experiment, base=folder, out=out, callback=clock, add_pages=write_report)
    end = now()
    peak = _peak_mb()
    again, resumed = Clock(), now()
    run_experiment(experiment, base=folder, out=out, resume=True, callback=again)
    checked = now()
    problems = verify_run(RunDirectory.open(out)).problems
    verified = now()
    if problems:
        raise RuntimeError(problems[0])
    marks = clock.marks[1:]
    size = {path.name: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    return Figures(
        clients=clients,
        setup=clock.marks[0][1] - begin[1],
        round_wall=tuple(b[0] - a[0] for a, b in pairwise(marks)),
        round=tuple(b[1] - a[1] for a, b in pairwise(marks)),
        results=end[1] - marks[-1][1],
        resume=again.marks[0][1] - resumed[1],
        verify=verified[1] - checked[1],
        data_mb=clients * EXAMPLES * (INPUTS * 4 + 8) / 1e6,
        live_mb=clock.live_mb,
        peak_mb=peak,
        report_mb=size["report.html"] / 1e6,
        privacy_mb=size["privacy.json"] / 1e6,
        run_mb=sum(size.values()) / 1e6,
    )


def live_mb() -> float:
    """Return the memory in use, without what the C library keeps for later (64 MB at a time)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(sizes: Sequence[int], turns: int, plan: Plan) -> dict[int, list[Figures]]:
    """Return the figures of each turn by number of clients; sizes take turns.

    Args:
        sizes: numbers of clients.
        turns: runs of each size.
        plan: of the measurement.
    """
    found: dict[int, list[Figures]] = {size: [] for size in sizes}
    for turn in range(turns):
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                write_data(Path(folder), size)
                command = [sys.executable, __file__, "--child", folder, "--clients", str(size)]
                command += plan.arguments
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{size} clients: {done.stderr[-2000:]}")
            fields = json.loads(done.stdout.splitlines()[-1])
            found[size].append(Figures(**{**fields, "round": tuple(fields["round"])}))
            print(f"turn {turn + 1}: {line_of(found[size][-1])}", flush=True)
    return found


def line_of(one: Figures) -> str:
    """Return one run for people."""
    return (
        f"{one.clients:>9,} clients: set-up {one.setup:6.2f} s, round "
        f"{statistics.median(one.round):5.2f} s ({statistics.median(one.round_wall):5.2f} s wall), "
        f"results {one.results:6.2f} s, resume {one.resume:6.2f} s, verify {one.verify:6.2f} s, "
        f"{one.live_mb:.0f} MB, at most {one.peak_mb:.0f} (data {one.data_mb:.0f}), "
        f"report {one.report_mb:.2f} MB, run {one.run_mb:.0f} MB"
    )


def numbers_of(found: Mapping[int, Sequence[Figures]], plan: Plan) -> list[Number]:
    """Return the numbers of a record: of rounds of 1 %, and of the growth over sizes.

    Args:
        found: figures of each turn by number of clients.
        plan: of the measurement.
    """
    kind = "clients of equal size" if plan.partition == "iid" else "clients of different sizes"
    kind += f", {plan.participants:,} a round"
    numbers = []
    most = found.get(SIZES[-1])
    if most is not None and plan.participants == SIZES[-1] // 100:
        claim = f"private: 100,000 {kind}"
        values = {
            "wall time of a round": ([_median(one.round_wall) for one in most], "s", 3.0),
            "peak memory": ([one.peak_mb for one in most], "MB", 1500.0),
            "report": ([one.report_mb for one in most], "MB", 5.0),
        }
        numbers += [
            over_turns(claim, case, each, unit=unit, goal=goal)
            for case, (each, unit, goal) in values.items()
        ]
    sizes = sorted(found)
    for size in sizes[1:]:
        case = f"among {size:,} over among {sizes[0]:,}"
        for what, of in _OF_A_CLIENT.items():
            each = ([of(one) for one in found[which]] for which in (size, sizes[0]))
            claim = f"private: {what}, {kind}"
            numbers.append(over_turns(claim, case, pair_ratios(*each), goal=FLAT))
    for small, large in pairwise(sizes):
        case = f"above {small:,} clients, to {large:,}"
        for what, (of, unit, scale) in _ADDED.items():
            added = [scale * one for one in _slopes(found[small], found[large], of)]
            claim = f"private: {what} that a further client adds, {kind}"
            numbers.append(over_turns(claim, case, added, unit=unit))
    return numbers


# What one client costs: in a round, and of all that a run takes.
_OF_A_CLIENT = {
    "processor time of a client's round": lambda one: _median(one.round),
    "memory of a run over its clients": lambda one: one.live_mb / one.clients,
    "set-up and results over clients": lambda one: (one.setup + one.results) / one.clients,
}

# The kinds of clients are more where each is asked more often, so these are no straight lines.
_ADDED = {
    "memory": (lambda one: one.live_mb, "bytes", 1e6),
    "processor time": (lambda one: one.setup + one.results, "µs", 1e6),
}


def _slopes(small: Sequence[Figures], large: Sequence[Figures], of: Any) -> list[float]:
    """Return what each further client adds, turn by turn."""
    pairs = zip(small, large, strict=False)
    return [(of(b) - of(a)) / (b.clients - a.clients) for a, b in pairs]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


_ROWS = {
    "set-up, s": lambda one: one.setup,
    "a round, s": lambda one: _median(one.round),
    "the same, wall time, s": lambda one: _median(one.round_wall),
    "results and report, s": lambda one: one.results,
    "resume, s": lambda one: one.resume,
    "`fedsim verify`, s": lambda one: one.verify,
    "examples, MB": lambda one: one.data_mb,
    "memory in use after the rounds, MB": lambda one: one.live_mb,
    "peak memory, MB": lambda one: one.peak_mb,
    "`report.html`, MB": lambda one: one.report_mb,
    "`privacy.json`, MB": lambda one: one.privacy_mb,
    "run directory, MB": lambda one: one.run_mb,
}


def table_of(record: Mapping[str, Any]) -> str:
    """Return the medians of a record as a table: a column for each number of clients."""
    runs = {int(size): [Figures(**one) for one in each] for size, each in record["runs"].items()}
    sizes = sorted(runs)
    lines = [
        "| | " + " | ".join(f"{size:,} clients" for size in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for name, of in _ROWS.items():
        cells = [_digits(statistics.median([of(one) for one in runs[size]])) for size in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def options_of_main() -> argparse.Namespace:
    """Return the options of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--participants", type=int, default=PARTICIPANTS, help="of a round")
    parser.add_argument("--rounds", type=int, default=7, help="of a run, at least 3")
    parser.add_argument("--turns", type=int, default=5, help="runs of each size")
    parser.add_argument("--partition", choices=["iid", "quantity"], default="iid")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write numbers, runs and machine")
    parser.add_argument("--table", type=Path, metavar="RECORD", help="print a record's figures")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.clients, options.rounds, options.turns = [4, 8, 12], 3, 1
        options.participants = 3
    return options


def main() -> None:
    """Measure what the command line asks for and print it."""
    options = options_of_main()
    plan = Plan(options.participants, options.rounds, options.partition)
    if options.table:
        print(table_of(json.loads(options.table.read_text())))
        return
    if options.child:
        import torch

        torch.set_num_threads(1)
        figures = run(options.child, options.clients[0], plan)
        print(json.dumps(asdict(figures)))
        return
    print(machine_line())
    found = measure(options.clients, options.turns, plan)
    numbers = numbers_of(found, plan)
    for number in numbers:
        print(number.line())
    if options.json:
        runs = {str(size): [asdict(one) for one in each] for size, each in found.items()}
        write_record(options.json, "scale.py", numbers, {"runs": runs})


if __name__ == "__main__":
    main()
