"""The ServerApp of a deployment, which runs the rounds and notices restarted SuperNodes.

A killed SuperNode loses the requests that it has not answered. Flower's SuperLink answers them with
an error while the node is offline, but never if it is online again before the server's next poll.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.experiment import load_experiment
from fedsim.federation.federation import Federation
from fedsim.protocol.errors import NODE_RESTARTED
from fedsim.protocol.traffic import WrappedGrid
from fedsim.report.run import run
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.server.app import NODE_SECONDS
from fedsim.simulation.engine import Engine, ShardableApp
from fedsim.tools.deployment.client_app import EXPERIMENT_FILE, collect_ledgers
from fedsim.tools.deployment.node_state import state_directory
from fedsim.tools.deployment.private_files import DeploymentError, absolute_path

logger = logging.getLogger("flwr")

OUT_KEY = "out"  # key of the app's run config
_POLL_SECONDS = 1.0


class DeployedGrid(WrappedGrid):
    """Flower's grid, but a request to a node that was restarted gets an error as its reply.

    Guarantee: a request is answered by its node, by the SuperLink, or by an error of code
    `NODE_RESTARTED` as soon as its node is active again; else it would expire after 12 hours.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        pause: Callable[[], None] = lambda: time.sleep(_POLL_SECONDS),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(grid)
        self._pause, self._clock = pause, clock

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the reply to each message, or an error instead of the reply."""
        deadline = None if timeout is None else self._clock() + timeout
        sent, before = list(messages), self._activations()
        ids: Sequence[str | None] = list(self.push_messages(sent))
        waiting = {name: message for name, message in zip(ids, sent, strict=False) if name}
        while waiting and (deadline is None or self._clock() < deadline):
            now = self._activations()  # before the pull: a reply from before a restart counts
            for reply in self.pull_messages(list(waiting)):
                waiting.pop(reply.metadata.reply_to_message_id, None)
                yield reply
            for name, message in list(waiting.items()):
                node = message.metadata.dst_node_id
                if node in now and now[node] != before.get(node, now[node]):
                    del waiting[name]
                    error = Error(NODE_RESTARTED, "its SuperNode was restarted during the request")
                    yield Message(error, reply_to=message)
            if waiting:
                self._pause()

    def wait_until_online(self, nodes: Collection[int], *, timeout: float) -> None:
        """Wait until all nodes are online, or until the timeout ends."""
        deadline = self._clock() + timeout
        while not set(nodes) <= set(self.get_node_ids()) and self._clock() < deadline:
            self._pause()

    def _activations(self) -> dict[int, str]:
        return {node.node_id: node.last_activated_at for node in self.get_nodes()}


class DeployedEngine(Engine):
    """An engine that executes a federation on the grid of Flower's ServerApp."""

    one_operator = False
    writes_ledger = False
    plans_blocks = False

    def __init__(self, grid: Grid, context: Context) -> None:
        self._grid = DeployedGrid(grid)
        self._context = context

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run `server_app`, which waits for the nodes, then collect the clients' ledgers."""
        try:
            server_app(self._grid, self._context)
        finally:
            if isinstance(client_app, ShardableApp) and client_app.ledger is not None:
                collect_ledgers(self._grid, client_app.ledger, timeout=NODE_SECONDS)


def deployed_server(directory: Path) -> ServerApp:
    """Return the ServerApp of an experiment; it starts or resumes the run in its `out`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        path, engine = directory / EXPERIMENT_FILE, DeployedEngine(grid, context)
        experiment = load_experiment(path).experiment
        if given := context.run_config.get(OUT_KEY):
            out = absolute_path(OUT_KEY, given, " on the machine of the SuperLink")
        else:
            out = state_directory({}) / "runs" / f"{experiment.name}-{context.run_id}"
        resume, rounds = (out / EXPERIMENT_FILE).is_file(), experiment.federation.rounds
        last = RunFiles(RunDirectory.open(out)).optional("summary.json") if resume else None
        if last and last.get("status") == "completed" and last["rounds"] >= rounds:
            raise DeploymentError(
                f"{out} holds a finished run; name a new directory: "
                f"flwr run . -c '{OUT_KEY}=\"/absolute/path\"'"
            )
        logger.info("run directory: %s%s", out, " (continued)" if resume else "")
        result = run(path, out=out, resume=resume, callback=_RoundLog(), engine=engine)
        logger.info("%s: %s, %s", result.path, result.status, dict(result.metrics))

    return app


class _RoundLog:
    """Callback that logs one line per round to Flower's log (`flwr run --stream` shows it)."""

    _rounds: int

    def started(self, federation: Federation, path: Path) -> None:
        self._rounds = federation.experiment.federation.rounds
        logger.info("waiting for %d SuperNodes", federation.num_nodes)

    def round_finished(self, row: Mapping[str, Any]) -> None:
        metrics = {k: v for k, v in row.items() if k.startswith("test_") or k == "epsilon_max"}
        logger.info("round %d of %d: %s", row["round"], self._rounds, metrics)
        for failed in row["failed"]:
            logger.warning("client %d failed: %s", failed["client"], failed["reason"])

    def ended(self) -> None: ...
