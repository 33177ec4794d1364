"""Engines by name: the local one, in one process, Flower's simulation, and Ray (`ray/`).

The local engine is Flower's `Grid` in one process, where sending a message is a function call.
Unchanged ServerApps, Strategies and ClientApps run on it without Ray and without serialization. For
fedsim's own apps without Flower mods, train requests are not even Flower messages
(`direct_channel`).

Some behaviour of the local engine that Flower does not specify:

- Node ids are `FIRST_NODE + partition`, in ascending order.
- Replies are computed one at a time, when they are read, in the order of the requests. So a
  strategy that reads the replies as a stream holds one reply at a time. `push_messages` with
  `pull_messages` works too.
- Each client gets separate records; their arrays are shared and read-only.
- An app that answers many requests at once (`BatchAnswers`) gets all requests of one message type
  when the first reply is read. An app with Flower mods is called once for each message.
- A client's `Context` keeps what the client wrote before an exception, so no charge is lost.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, groupby
from threading import Event
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict, UserConfigValue
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.clients.app import BatchAnswers
from fedsim.clients.client_round import Answer
from fedsim.clients.faults import ClientFailureError
from fedsim.protocol.arrays import live_record
from fedsim.protocol.flower_internals import preserve_identity, replace_content, server_identity
from fedsim.protocol.messages import TrainRequest
from fedsim.protocol.traffic import ClientError, TrainAnswer
from fedsim.simulation.engine import (
    RUN_ID,
    Engine,
    EngineError,
    VirtualGrid,
    answer_requests,
    failure_reason,
    frozen_objects,
    keep_freed_memory,
    reply_of,
)
from fedsim.simulation.settings import RuntimeSettings


@dataclass(frozen=True)
class DirectChannel:
    """Channel that passes train requests to clients of this process without Flower messages.

    Attributes:
        app: the app that every client runs.
        contexts: the context of every node, by node id.
    """

    app: BatchAnswers
    contexts: Mapping[int, Context]

    def train(
        self, requests: Mapping[int, TrainRequest], *, timeout: float | None = None
    ) -> Iterator[tuple[int, TrainAnswer]]:
        """Yield the node id and the answer of each client, in the order of the requests.

        Args:
            requests: the request to each node, by node id, in ascending order of clients.
            timeout: ignored, because a client in the same process cannot be interrupted.
        """
        answers = chain.from_iterable(self.app.answer_requests(self._with_contexts(requests)))
        for node, answer in zip(requests, answers, strict=True):
            yield node, _without_exception(node, answer)

    def _with_contexts(
        self, requests: Mapping[int, TrainRequest]
    ) -> Iterator[tuple[TrainRequest, Context]]:
        live, last, copied = LiveArrayCache(), None, None
        for node, request in requests.items():
            if copied is None or request is not last:  # most clients get the same one
                last, copied = request, replace(request, arrays=live.of(request.arrays))
            yield copied, self.contexts[node]


class LiveArrayCache:
    """Cache of the last array record, so that requests with this record share a read-only copy."""

    def __init__(self) -> None:
        self._last: tuple[ArrayRecord, ArrayRecord] | None = None

    def of(self, record: ArrayRecord) -> ArrayRecord:
        """Return a read-only copy of a record; successive calls with one record share the copy."""
        if self._last is None or self._last[0] is not record:
            values = {name: array.numpy() for name, array in record.items()}
            self._last = record, live_record(values)
        return self._last[1]


def _without_exception(node: int, answer: Answer) -> TrainAnswer:
    if isinstance(answer, ClientFailureError):
        return ClientError(str(answer), answer.code)
    if isinstance(answer, Exception):
        return ClientError(failure_reason(node, answer))
    return answer


class LocalGrid(VirtualGrid):
    """Flower grid whose nodes are in this process; each node has a persistent `Context`.

    Args:
        client_app: the app that every node runs.
        num_clients: the number of nodes.
        run_config: the configuration of the run in the context of every node.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        *,
        run_config: Mapping[str, UserConfigValue] | None = None,
    ) -> None:
        super().__init__(num_clients, run_config=run_config)
        self._client_app = client_app

    def direct_channel(self) -> DirectChannel | None:
        """Return the channel that sends train requests without Flower messages, if it can be used.

        The result is None if the app is not fedsim's, if the app has Flower mods, or if a subclass
        of the grid overrides `send_and_receive`.
        """
        app, watched = self._client_app, type(self).send_and_receive is not _SEND_AND_RECEIVE
        if isinstance(app, BatchAnswers) and app.takes_batches and not watched:
            return DirectChannel(app, self._contexts)
        return None

    def numbered_nodes(self) -> Sequence[int] | None:
        """Return the ids of all nodes, in the order of their partition numbers.

        The result is None where `direct_channel` returns None. The server then sends a message to
        each node to get the node's number.
        """
        return None if self.direct_channel() is None else self.node_range

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the reply to each message, in the order of the messages.

        Args:
            messages: the requests.
            timeout: ignored, because a client in the same process cannot be interrupted.
        """
        live = LiveArrayCache()
        for _, same_kind in groupby(messages, key=lambda message: message.metadata.message_type):
            group = list(same_kind)
            for message in group:
                self._set_id(message)
            requests = [
                (_private_copy(message, live), self._contexts[message.metadata.dst_node_id])
                for message in group
            ]
            answers = chain.from_iterable(answer_requests(self._client_app, requests))
            for message, answer in zip(group, answers, strict=True):
                reply = reply_of(message, answer)
                self._set_id(reply)
                yield reply


_SEND_AND_RECEIVE = LocalGrid.send_and_receive


def _private_copy(message: Message, live: LiveArrayCache) -> Message:
    """Return a message with copied records, as strategies share one RecordDict among messages."""
    records = {
        name: live.of(record).copy() if isinstance(record, ArrayRecord) else record.copy()
        for name, record in message.content.items()
    }
    return replace_content(message, RecordDict(records))


class LocalEngine(Engine):
    """Engine that runs all clients in this process, without serialization.

    It runs any Flower app, too, without Ray and without a SuperLink:

        LocalEngine(run_config={"lr": 0.1}).execute(server_app, client_app, num_nodes=10)

    Args:
        grid: function that creates the grid from the nodes' app, the number of nodes and
            `run_config`.
        run_config: the configuration of a Flower app, which every app finds in
            `context.run_config`.
    """

    def __init__(
        self,
        grid: Callable[..., LocalGrid] = LocalGrid,
        *,
        run_config: Mapping[str, UserConfigValue] | None = None,
    ) -> None:
        self._grid, self._run_config = grid, dict(run_config or {})

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run a federation in this process until the server app returns."""
        keep_freed_memory()
        with frozen_objects(), server_identity(RUN_ID):
            server_app(
                self._grid(client_app, num_nodes, run_config=self._run_config),
                Context(
                    run_id=RUN_ID,
                    node_id=0,
                    node_config={},
                    state=RecordDict(),
                    run_config=dict(self._run_config),
                ),
            )


class FlowerEngine(Engine):
    """Engine that uses Flower's simulation runtime with Ray workers (extra `ray`).

    Args:
        workers: the number of Ray workers, each with one thread.
    """

    plans_blocks = False

    def __init__(self, workers: int) -> None:
        self._workers = workers

    @contextmanager
    def session(self) -> Iterator[None]:
        """Check that Ray is installed; no resources are held.

        Raises:
            EngineError: Ray is not installed.
        """
        if find_spec("ray") is None:
            raise EngineError(
                "engine flower needs Ray: install the extra with pip install 'fedsim-dp[ray]', "
                "or use engine: local"
            )
        yield

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run a federation in Flower's simulation until the server app returns.

        The simulation has a thread of its own, because an interrupt in its code disconnects Ray
        while its workers use Ray, and Ray then ends the process at once. An interrupted run ends
        when the clients that are training have finished the round.
        """
        from flwr.simulation import run_simulation

        from fedsim.simulation.ray.session import later_signals, local_ray

        logging.getLogger("flwr").setLevel(logging.ERROR)
        stopped = Event()
        with (
            preserve_identity(),
            local_ray(num_cpus=self._workers),
            ThreadPoolExecutor(1) as executor,
        ):
            try:
                with later_signals():  # an interrupted executor would not wait for its thread
                    simulation = executor.submit(
                        run_simulation,
                        _stoppable(server_app, stopped),
                        client_app,
                        num_supernodes=num_nodes,
                        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
                    )
                simulation.result()
            except KeyboardInterrupt:
                stopped.set()  # the simulation ends once its workers have no message
                raise


def _stoppable(server_app: ServerApp, stopped: Event) -> ServerApp:
    """Return an app that runs `server_app`, and ends it at a call of the grid if `stopped` is set.

    Otherwise the server would continue, and write files, after an interrupt of the main thread.
    """
    app = ServerApp()

    def checked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if stopped.is_set():
                raise EngineError("the run was interrupted")
            return method(*arguments, **options)

        return call

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for name in ("get_node_ids", "push_messages", "pull_messages"):
            setattr(grid, name, checked(getattr(grid, name)))
        server_app(grid, context)

    return app


def engine_for(settings: RuntimeSettings) -> Engine:
    """Return the engine that the settings of `runtime:` name."""
    match settings.engine:
        case "local":
            return LocalEngine()
        case "flower":
            return FlowerEngine(settings.workers)
        case "ray":
            from fedsim.simulation.ray.engine import RayEngine

            return RayEngine(settings)
