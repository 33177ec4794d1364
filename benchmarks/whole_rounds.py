"""Whole rounds of a federation: with secure aggregation, and with correlated noise.

    python benchmarks/whole_rounds.py --json out.json

What runs of each kind of `noise_correlation` cost beside `none`, in turns, in processor time of one
thread: the median of the second half of the rounds, when all buffers are full. Secure aggregation
is measured by `secure_aggregation.py`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from records import Number, machine_line, over_turns, pair_ratios, write_record

from fedsim.algorithms.state import ServerState
from fedsim.experiment import load_experiment
from fedsim.federation.apps import client_app, server_app
from fedsim.federation.assembly import assemble
from fedsim.server.round_report import RoundReport
from fedsim.simulation.engines import LocalEngine

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
NOISE: Mapping[str, Any] = {"none": "none", "identity": "identity", "tree": "tree", "blt": "blt"}
CLAIM = "noise_correlation: a round over one with none, processor time"
MOST = 1.3  # rounds with correlated noise over rounds with independent noise


@dataclass(frozen=True)
class WholeRounds:
    """Processor seconds of a round, and what was trained in it.

    Attributes:
        plain: median of rounds in clear.
        secure: median of rounds under additive sharing.
        ratios: of neighbouring runs.
        steps: local steps of a client.
        parameters: of the model.
    """

    plain: float
    secure: float
    ratios: tuple[float, ...]
    steps: int
    parameters: int


def whole_rounds(
    *, width: int, clients: int, training: float, rounds: int, turns: int
) -> WholeRounds:
    """Measure rounds in which local training takes about `training` seconds in all.

    Args:
        width: of the two hidden layers of the model.
        clients: clients of a round, one after the other on one thread.
        training: seconds of processor time that a plain round should take.
        rounds: rounds of a run; the second half is counted.
        turns: runs of each.
    """
    few, more = 2, 10
    short, probe = (_run(_experiment(width, clients, n, rounds, None)) for n in (few, more))
    step = max((probe.seconds - short.seconds) / (more - few), 1e-6)
    steps = max(1, round(training / step))
    plain, secure = [], []
    for _ in range(turns):
        plain.append(_run(_experiment(width, clients, steps, rounds, None)).seconds)
        secure.append(_run(_experiment(width, clients, steps, rounds, {})).seconds)
    return WholeRounds(
        statistics.median(plain),
        statistics.median(secure),
        tuple(s / p for p, s in zip(plain, secure, strict=True)),
        steps,
        probe.parameters,
    )


@dataclass(frozen=True)
class _Measured:
    seconds: float
    parameters: int


def _experiment(
    width: int, clients: int, steps: int, rounds: int, secure: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "name": "whole-rounds",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": clients}},
        "model": {"name": "mlp", "args": {"hidden": [width, width]}},
        "federation": {"rounds": rounds, "weighting": "examples"},
        "local": {"steps": steps, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.05}},
        "privacy": None,
        "secure_aggregation": secure,
    }


_TURNS = {"scheme": "min_separation"}
_FEDERATIONS: Mapping[str, tuple[str, dict[str, Any], int]] = {  # with the bands of toeplitz
    "4,000 users of 5 examples, 210 parameters": (
        "users_ftrl.yaml",
        {"federation.rounds": 400, "privacy.target_epsilon": None, "privacy.noise_multiplier": 4},
        128,
    ),
    "671 users of MovieLens, 9,066 parameters": (
        "movielens.yaml",
        {
            "data.dataset": "movielens_small",
            "model.args.films": 9066,
            "federation": {"rounds": 100, "clients_per_round": 20, "participation": _TURNS},
        },
        33,
    ),
    "400 clients of digits, 190,410 parameters": (
        "",
        {
            "model": {"name": "mlp", "args": {"hidden": [400, 400]}},
            "local.batch_size": "full",
            "federation": {"rounds": 90, "clients_per_round": 10, "participation": _TURNS},
            "privacy": {
                **{"trust": "central", "unit": "client", "noise_multiplier": 4.0},
                **{"delta": 1e-3, "max_update_norm": 0.1},
            },
        },
        40,
    ),
}

_FEW = {
    "federation.rounds": 4,
    "data.args.examples": 1000,
    "data.partition.num_clients": 100,
}


def correlated_rounds(*, turns: int, quick: bool) -> list[Number]:
    """Measure rounds with each kind of correlated noise over rounds with independent noise.

    Args:
        turns: runs of each.
        quick: only show that it runs, on few rounds of the first federation.
    """
    numbers = list[Number]()
    for case, (name, changes, bands) in list(_FEDERATIONS.items())[: 1 if quick else None]:
        source = EXPERIMENTS / name if name else _experiment(400, 400, 1, 1, None)
        seconds: dict[str, list[float]] = {}
        for _ in range(turns):
            for kind, noise in {**NOISE, "toeplitz": {"name": "toeplitz", "bands": bands}}.items():
                keys = {**changes, **(_FEW if quick else {}), "privacy.noise_correlation": noise}
                seconds.setdefault(kind, []).append(_run(source, keys).seconds)
        for kind, measured in list(seconds.items())[1:]:
            ratios = pair_ratios(measured, seconds["none"])
            numbers.append(over_turns(CLAIM, f"{kind}, {case}", ratios, goal=MOST))
            print(numbers[-1].line(), flush=True)
    return numbers


def main() -> None:
    """Measure rounds with correlated noise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="runs of each")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write numbers and machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine_line())
    numbers = correlated_rounds(turns=1 if options.quick else options.turns, quick=options.quick)
    if options.json:
        write_record(options.json, "whole_rounds.py", numbers)


def _run(experiment: Mapping[str, Any] | Path, keys: Mapping[str, Any] | None = None) -> _Measured:
    """Run a federation without its run directory and return the median time of its last rounds."""
    with tempfile.TemporaryDirectory() as directory:
        ledger = Path(directory) / "ledger.jsonl"
        federation = assemble(
            load_experiment(experiment, overrides=keys or {}), ledger=ledger, in_process=True
        )
        ends: list[float] = []

        def on_round(_: ServerState, __: RoundReport) -> None:
            ends.append(time.process_time())

        def on_stop(reason: str) -> None:
            raise RuntimeError(reason)

        server = server_app(
            federation,
            start=ServerState(federation.initial_arrays()),
            on_round=on_round,
            on_stop=on_stop,
            ledgers=None,
        )
        client = client_app(federation)
        LocalEngine().execute(server, client, federation.num_nodes)
    times = [end - start for start, end in pairwise(ends)]
    size = sum(one.numel() for one in federation.model.module.parameters())
    return _Measured(statistics.median(times[len(times) // 2 :]), size)


if __name__ == "__main__":
    main()
