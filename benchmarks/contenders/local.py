"""fedsim's local engine: server, grid, messages, accounts and ledger on disk, all included."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import numpy as np

from contenders.base import Contender, Work
from fedsim.experiment import load_experiment
from fedsim.federation import assemble
from fedsim.server.app import call_roll, run_round
from fedsim.server.privacy_book import PrivacyBook
from fedsim.server.strategies import FedAvg
from fedsim.simulation.flower_internals import server_identity
from fedsim.simulation.local_grid import LocalGrid
from fedsim.simulation.memory import frozen_objects, keep_freed_memory

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
        cohort: `runtime.cohort`.
    """

    def __init__(self, cohort: Literal["auto", "off"] = "auto") -> None:
        self._cohort = cohort
        self.name = "fedsim" if cohort == "auto" else "fedsim, one by one"

    def prepare(self, work: Work) -> None:
        """Get ready for the first round; not timed."""
        keep_freed_memory()
        self._open = ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        federation = assemble(
            load_experiment(self._experiment(work, folder), base=folder),
            ledger=folder / "ledger.jsonl",
        )
        self._open.enter_context(frozen_objects())
        self._open.enter_context(server_identity(1))
        app = federation.client_app(in_process=True, ledger=None)
        self._grid = LocalGrid(app, work.clients)
        self._book = PrivacyBook("pld") if work.private else None
        self._strategy = FedAvg(
            settings=federation.experiment.federation,
            participation=federation.participation,
            roster=call_roll(self._grid, work.clients, patience=1.0),
            book=self._book,
        )
        self._arrays, self._round = federation.initial_arrays(), 0

    def round(self) -> None:
        """Do one round: every client is charged and trains, the server averages and accounts."""
        self._round += 1
        result = run_round(
            self._strategy, self._grid, self._round, self._arrays, lambda _: {}, self._book
        )
        if result.failed:
            raise RuntimeError(f"clients failed: {result.failed[0].reason}")
        self._arrays = result.arrays

    def close(self) -> None:
        """Give back what `prepare` took."""
        self._open.close()

    def _experiment(self, work: Work, folder: Path) -> dict[str, object]:
        import pickle

        x, y = work.data()
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        (folder / "model.pickle").write_bytes(pickle.dumps(work.build()))
        (folder / "work.py").write_text(_PLUG_IN)
        content: dict[str, object] = {
            "name": "benchmark",
            "data": {
                "dataset": "./work.py:load",
                "partition": {"scheme": "iid", "num_clients": work.clients},
            },
            "model": {"name": "./work.py:build"},
            "federation": {"rounds": 1000},
            "local": {
                "steps": work.steps,
                "batch_size": work.batch,
                "optimizer": {"name": "sgd", "lr": work.lr},
            },
            "runtime": {"device": "cpu", "cohort": self._cohort},
        }
        if work.private:
            content["privacy"] = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}
        return content
