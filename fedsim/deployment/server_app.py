"""The ServerApp of a deployment: runs the rounds and writes the run directory."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.deployment.client_app import EXPERIMENT_FILE
from fedsim.deployment.deployed_grid import DeployedGrid
from fedsim.deployment.errors import DeploymentError
from fedsim.deployment.ledgers import collect_ledgers
from fedsim.deployment.node_state import state_directory
from fedsim.experiment import load_experiment
from fedsim.federation.federation import Federation
from fedsim.report.run import run
from fedsim.runs.directory import RunDirectory
from fedsim.simulation.engine import Engine
from fedsim.simulation.shardable_app import ShardableApp

logger = logging.getLogger("flwr")

OUT_KEY = "out"  # key of the app's run config


class DeployedEngine(Engine):
    """Executes a federation on the grid of Flower's ServerApp."""

    patience = 600.0  # a SuperNode may start a process for every message
    one_operator = False
    writes_ledger = False
    plans_blocks = False

    def __init__(self, grid: Grid, context: Context) -> None:
        self._grid = DeployedGrid(grid)
        self._context = context

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run `server_app` with the connected nodes, then collect the clients' ledgers.

        Args:
            server_app: runs the rounds.
            client_app: not run here, since clients run on SuperNodes; names the ledger's copy.
            num_nodes: not used; `server_app` waits for the nodes.
        """
        try:
            server_app(self._grid, self._context)
        finally:
            if isinstance(client_app, ShardableApp) and client_app.ledger is not None:
                collect_ledgers(self._grid, client_app.ledger, timeout=self.patience)


def deployed_server(directory: Path) -> ServerApp:
    """Return the ServerApp of the experiment in `directory`.

    The run directory is `out` of the run config, on the machine of the SuperLink. An unfinished run
    in it is resumed.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        experiment = load_experiment(directory / EXPERIMENT_FILE)
        out = _run_directory(context.run_config, experiment.experiment.name, context.run_id)
        resume = (out / "experiment.yaml").is_file()
        if resume and _is_finished(out, experiment.experiment.federation.rounds):
            raise DeploymentError(
                f"{out} holds a finished run; name a new directory: "
                f"flwr run . -c '{OUT_KEY}=\"/absolute/path\"'"
            )
        logger.info("run directory: %s%s", out, " (continued)" if resume else "")
        result = run(
            directory / EXPERIMENT_FILE,
            out=out,
            resume=resume,
            observer=_RoundLog(experiment.experiment.federation.rounds),
            engine=DeployedEngine(grid, context),
        )
        logger.info("%s: %s, %s", result.path, result.status, dict(result.metrics))

    return app


class _RoundLog:
    """Logs one line per round to Flower's log, which `flwr run --stream` shows."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def started(self, federation: Federation, path: Path) -> None:
        logger.info("waiting for %d SuperNodes", federation.num_nodes)

    def round_finished(self, row: Mapping[str, Any]) -> None:
        metrics = {
            name: value
            for name, value in row.items()
            if name.startswith("test_") or name == "epsilon_max"
        }
        logger.info("round %d of %d: %s", row["round"], self._rounds, metrics)
        for failed in row["failed"]:
            logger.warning("client %d failed: %s", failed["client"], failed["reason"])

    def ended(self) -> None: ...


def _run_directory(run_config: Mapping[str, object], name: str, run_id: int) -> Path:
    given = run_config.get(OUT_KEY)
    if not given:
        return state_directory({}) / "runs" / f"{name}-{run_id}"
    path = Path(str(given)).expanduser()
    if not path.is_absolute():
        raise DeploymentError(
            f"{OUT_KEY}: must be an absolute path on the machine of the SuperLink, got {given!r}"
        )
    return path


def _is_finished(out: Path, rounds: int) -> bool:
    directory = RunDirectory.open(out)
    if not (out / "summary.json").is_file():
        return False
    summary = directory.read_json("summary.json")
    return summary["status"] == "completed" and summary["rounds"] >= rounds
