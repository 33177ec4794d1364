"""Whole rounds of a federation, in clear and under secure aggregation, in turns."""

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedsim.algorithms.state import ServerState
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.nodes import client_app
from fedsim.federation.server import server_app
from fedsim.server.round_report import RoundReport
from fedsim.simulation.local_engine import LocalEngine


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
        rounds: rounds of a run; the first, which warms up, is not counted.
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


def _run(experiment: Mapping[str, Any]) -> _Measured:
    """Run a federation without its run directory and return the median time of its rounds."""
    with tempfile.TemporaryDirectory() as directory:
        ledger = Path(directory) / "ledger.jsonl"
        federation = assemble(load_experiment(experiment), ledger=ledger, in_process=True)
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
        client = client_app(federation, in_process=True, ledger=None)
        LocalEngine().execute(server, client, federation.num_nodes)
    times = [end - start for start, end in pairwise(ends)]
    size = sum(one.numel() for one in federation.model.module.parameters())
    return _Measured(statistics.median(times), size)
