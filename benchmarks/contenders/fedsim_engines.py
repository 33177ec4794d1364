"""fedsim's engines: server, grid, messages, accounts and ledger on disk, all included."""

import pickle
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from contenders.base import Contender, Work, check_device
from contenders.turns import Turns
from fedsim.algorithms.state import ServerState
from fedsim.experiment import load_experiment
from fedsim.federation.apps import client_app
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.nodes import FederationClientApp
from fedsim.protocol.flower_internals import server_identity
from fedsim.server.aggregation.aggregator import PlainAggregator
from fedsim.server.app import register_nodes, run_round
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.round_parts import Charges
from fedsim.server.train_round import RoundSetup
from fedsim.simulation.engine import frozen_objects, keep_freed_memory
from fedsim.simulation.engines import LocalGrid, engine_for

_PLUG_IN = """
import numpy as np
import pickle
from pathlib import Path

HERE = Path(__file__).parent

def load(seed=0):
    x, y = np.load(HERE / "x.npy"), np.load(HERE / "y.npy")
    return x, y, x[:64], y[:64]

def build():
    return pickle.loads((HERE / "model.pickle").read_bytes())
"""


class LocalEngine(Contender):
    """The rounds of a federation in one process.

    Args:
        vectorized_clients: `local.vectorized_clients`.
        device: `runtime.device`.
    """

    def __init__(
        self,
        vectorized_clients: Literal["auto", "off"] = "auto",
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        self._cohort: Literal["auto", "off"] = vectorized_clients
        self._device = device
        self.name = "fedsim" if vectorized_clients == "auto" else "fedsim, one by one"
        self.name += "" if device == "cpu" else f", {device}"

    def prepare(self, work: Work) -> None:
        """Get ready for the first round; not timed."""
        check_device(self._device)
        keep_freed_memory()
        self._open = ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        runtime = {"device": self._device}
        federation = federation_of(work, folder, runtime, vectorized_clients=self._cohort)
        self._open.enter_context(frozen_objects())
        self._open.enter_context(server_identity(1))
        app = client_app(federation)
        self._server = _Server(federation, LocalGrid(app, work.clients))

    def round(self) -> None:
        """Do one round: every client is charged and trains, the server averages and accounts."""
        self._server.round()

    def close(self) -> None:
        """Give back what `prepare` took."""
        self._open.close()


class RayWorkers(Contender):
    """The rounds of a federation on worker processes.

    Args:
        workers: `runtime.workers`.
    """

    def __init__(self, workers: int) -> None:
        import ray  # noqa: F401  left out without it

        self._workers = workers
        self.name = f"fedsim, ray, {workers} worker{'s' if workers > 1 else ''}"

    def prepare(self, work: Work) -> None:
        """Get ready for the first round; not timed."""
        self._open = ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        runtime = {"engine": "ray", "workers": self._workers}
        federation = federation_of(work, folder, runtime)
        clients = FederationClientApp(federation, folder / "ledger.jsonl")
        engine = engine_for(federation.experiment.runtime)

        def body(turns: Turns) -> None:
            app = ServerApp()

            @app.main()
            def main(grid: Grid, context: Context) -> None:
                server = _Server(federation, grid)
                while turns.go_on():
                    server.round()
                    turns.done()

            engine.execute(app, clients, work.clients)

        self._turns = Turns(body)

    def round(self) -> None:
        """Do one round: every client is charged and trains, the server averages and accounts."""
        self._turns.round()

    def close(self) -> None:
        """Give back what `prepare` took."""
        self._turns.stop()
        self._open.close()


class _Server:
    """The server of a federation, one round at a time."""

    def __init__(self, federation: Federation, grid: Grid) -> None:
        self._grid = grid
        self._setup = RoundSetup(
            federation.algorithm,
            federation.plan.participation,
            register_nodes(grid, federation.num_clients, 0, patience=60.0).clients,
            PlainAggregator(federation.plan.weights),
            evaluate=lambda _: {},
            weights=federation.plan.weights,
            steps=federation.plan.steps,
            parts=() if federation.plan.clients is None else (Charges(ClientLedgers("pld")),),
        )
        self._state = ServerState(federation.initial_arrays())

    def round(self) -> None:
        """Run the next round."""
        self._state, report = run_round(self._state, self._setup, self._grid)
        if report.clients.failed:
            raise RuntimeError(f"clients failed: {report.clients.failed[0].reason}")


def federation_of(
    work: Work,
    folder: Path,
    runtime: Mapping[str, object],
    *,
    vectorized_clients: Literal["auto", "off"] = "auto",
) -> Federation:
    """Return the federation that does some work, with its ledger and its files in `folder`."""
    work.save_data(folder)
    local = {
        "steps": work.steps,
        "batch_size": work.batch,
        "lr": work.lr,
        "vectorized_clients": vectorized_clients,
    }
    privacy = {
        "noise_multiplier": work.noise_multiplier,
        "delta": work.delta,
        "max_grad_norm": work.max_grad_norm,
    }
    return _assemble(
        work.build(), folder, work.clients, local, privacy if work.private else None, runtime
    )


def federation_of_examples(model: nn.Module, x: Tensor, y: Tensor, folder: Path) -> Federation:
    """Return a federation of one private client whose every batch is all of its examples.

    Args:
        model: the architecture.
        x: the client's examples (n, ...).
        y: their classes (n,).
        folder: an empty folder for its files.
    """
    for name, values in (("x", x), ("y", y)):
        np.save(folder / f"{name}.npy", values.numpy())
    privacy = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0}
    local = {"steps": 1, "batch_size": len(x), "lr": 0.01, "vectorized_clients": "auto"}
    return _assemble(model, folder, 1, local, privacy, {})


def _assemble(
    model: nn.Module,
    folder: Path,
    clients: int,
    local: Mapping[str, object],
    privacy: Mapping[str, object] | None,
    runtime: Mapping[str, object],
) -> Federation:
    """Return the federation of the examples that were saved in `folder`."""
    (folder / "model.pickle").write_bytes(pickle.dumps(model))
    (folder / "work.py").write_text(_PLUG_IN)
    content: dict[str, object] = {
        "name": "benchmark",
        "data": {
            "dataset": "./work.py:load",
            "partition": {"scheme": "iid", "num_clients": clients},
        },
        "model": {"name": "./work.py:build"},
        "federation": {"rounds": 1000},
        "local": {
            "steps": local["steps"],
            "batch_size": local["batch_size"],
            "optimizer": {"name": "sgd", "lr": local["lr"]},
            "vectorized_clients": local["vectorized_clients"],
        },
        "privacy": privacy,
        "runtime": {"device": "cpu", **runtime},
    }
    loaded, here = load_experiment(content, base=folder), runtime.get("engine") != "ray"
    return assemble(loaded, ledger=folder / "ledger.jsonl", in_process=here)
