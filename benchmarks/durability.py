"""What the ledger on disk and the checkpoints add to a run.

    python benchmarks/durability.py [--quick] [--json [FILE]]

The quickstart's federation (experiments/digits_dp.yaml), one thread, rounds in turns: as `fedsim
run` does them, without the checkpoints, and with neither ledger nor checkpoints. The difference of
two such runs is below what a shared machine disturbs, so the ratio is over pairs of rounds that are
neighbours in time, and beside it stands what the writing alone took. Goal: what the rounds take
longer is at most 5 % of the whole command's time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from records import Number, quartiles, write_record

from fedsim.algorithms.state import ServerState
from fedsim.experiment import load_experiment
from fedsim.federation.apps import client_app
from fedsim.federation.assembly import assemble
from fedsim.protocol.flower_internals import server_identity
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import LinesFile
from fedsim.runs.records import RunCheckpoint
from fedsim.server.aggregation.aggregator import PlainAggregator
from fedsim.server.app import run_round
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.round_parts import Charges
from fedsim.server.round_report import RoundReport
from fedsim.server.train_round import RoundSetup
from fedsim.simulation.engine import FIRST_NODE
from fedsim.simulation.engines import LocalGrid

QUICKSTART = Path(__file__).parent.parent / "experiments" / "digits_dp.yaml"
GOAL = 0.05


class Contender:
    """A federation that is asked for one round after the other.

    Args:
        directory: where its run is written; None: nothing is.
        checkpoints: write one after each round.
    """

    def __init__(self, directory: Path | None, *, checkpoints: bool) -> None:
        loaded = load_experiment(QUICKSTART)
        run = None if directory is None else RunDirectory(directory)
        if run is not None:
            run.create(experiment="", environment={}, inputs={})
        ledger = None if run is None else run.ledger
        self._federation = assemble(loaded, ledger=ledger, in_process=True)
        self._run = run if checkpoints else None
        self._rounds = None if run is None else LinesFile(run.rounds)
        clients = self._federation.num_clients
        app = client_app(self._federation)
        self._grid = LocalGrid(app, clients)
        privacy = loaded.experiment.privacy
        parts = ()
        if privacy is not None:
            parts = (Charges(ClientLedgers(privacy.accountant.name, privacy.adjacency.name)),)
        self._setup = RoundSetup(
            self._federation.algorithm,
            self._federation.plan.participation,
            {FIRST_NODE + client: client for client in range(clients)},
            PlainAggregator(self._federation.plan.weights),
            self._federation.test_metrics,
            weights=self._federation.plan.weights,
            steps=self._federation.plan.steps,
            parts=parts,
        )
        self._state = ServerState(self._federation.initial_arrays())
        self.writing = 0.0

    def round(self) -> float:
        """Run the next round and return its seconds."""
        started = time.perf_counter()
        with server_identity(1):
            self._state, report = run_round(self._state, self._setup, self._grid)
        self._keep(report)
        return time.perf_counter() - started

    def _keep(self, report: RoundReport) -> None:
        if self._run is None or self._rounds is None:
            return
        started = time.perf_counter()
        self._rounds.append(json.dumps(report.to_json()))
        self._run.write_checkpoint(RunCheckpoint(self._state, {}, self._rounds.digest))
        self.writing += time.perf_counter() - started


def serve(directory: Path | None, checkpoints: bool, line: Connection) -> None:
    """Be a contender in a process of its own: a round for each message, until None comes.

    In one process the first contender would compute every ε, and the others find it remembered.
    """
    torch.set_num_threads(1)
    with line:  # closed on an error too, so that nobody waits for an answer
        contender = Contender(directory, checkpoints=checkpoints)
        line.send(None)
        while line.recv() is not None:
            line.send(contender.round())
        line.send(contender.writing)


def measure(rounds: int, base: Path) -> dict[str, float]:
    """Return seconds of a round of each contender and the ratios to the one that writes nothing."""
    contenders = {
        "nothing on disk": (None, False),
        "ledger": (base / "ledger", False),
        "ledger and checkpoint": (base / "both", True),
    }
    lines = {name: _started(*how) for name, how in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, line in lines.items():
            line.send("round")
            times[name].append(line.recv())
    bare = times["nothing on disk"]
    found = {name: statistics.median(values) for name, values in times.items()}
    for name in ("ledger", "ledger and checkpoint"):
        pairs = [one / other for one, other in zip(times[name], bare, strict=True)]
        found[f"{name}, ratio"] = statistics.median(pairs)
    for name, line in lines.items():
        line.send(None)
        writing = line.recv()
        if contenders[name][1]:
            found["checkpoint alone"] = writing / rounds
    found["the whole command"] = _command(base)
    pairs = zip(times["ledger and checkpoint"], bare, strict=True)
    longer = [rounds * (one - other) / found["the whole command"] for one, other in pairs]
    names = (
        "overhead, lower quartile, ratio",
        "overhead, ratio",
        "overhead, upper quartile, ratio",
    )
    found.update(zip(names, quartiles(longer), strict=True))
    return found


def _command(base: Path) -> float:
    """Return the seconds of `fedsim run` on the quickstart, as a process."""
    code = "from fedsim.cli import main; main()"
    command = [sys.executable, "-c", code, "run", str(QUICKSTART), "-q", "--out", str(base / "run")]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def _started(directory: Path | None, checkpoints: bool) -> Connection:
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(
        target=serve, args=(directory, checkpoints, there), daemon=True
    )
    process.start()
    here.recv()
    return here


def main() -> None:
    """Print the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write a record; without FILE, print"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        found = measure(4 if options.quick else 60, Path(base))
    if options.json == "-":
        print(json.dumps(found, indent=2))
        return
    if options.json:
        claim = "ledger and checkpoints over the quickstart's whole time"
        low, middle, high = (found[name] for name in found if name.startswith("overhead"))
        number = Number(claim, "quickstart", middle, low, high, goal=GOAL)
        write_record(Path(options.json), "durability.py", [number], {"seconds": found})
    for name, value in found.items():
        unit = f"{value:6.3f} x" if name.endswith("ratio") else f"{value * 1e3:6.2f} ms"
        print(f"{name:<32} {unit}")
    overhead = found["overhead, ratio"]
    verdict = "met" if overhead <= GOAL else "missed"
    print(f"overhead {overhead:.1%} of the quickstart's time; goal {GOAL:.0%}: {verdict}")


if __name__ == "__main__":
    main()
