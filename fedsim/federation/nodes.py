"""Flower apps for the nodes of a federation: clients, and helpers of secure aggregation.

Nodes 0 to `num_clients` - 1 are clients, the next node is helper 1. A helper belongs to the
server's side. Only a simulation runs a helper in one process with clients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import Journal
from fedsim.clients.app import BatchClientApp, one_thread, partition_of
from fedsim.clients.client_round import BlockOf
from fedsim.clients.task import ClientTask
from fedsim.core.plugin_sources import read_sources
from fedsim.data import Examples, FederatedData
from fedsim.experiment import Experiment, ExperimentWithClients, LoadedExperiment
from fedsim.federation.assembly import assemble
from fedsim.federation.blocks import BlockPlan
from fedsim.federation.federation import Federation, goal_of
from fedsim.federation.mechanism_probe import probe_mechanisms
from fedsim.federation.trained_model import (
    NUM_CHECK_EXAMPLES,
    NUM_PROBE_EXAMPLES,
    choose_device,
    federation_model,
    initial_model,
    public_examples,
    to_tensors,
)
from fedsim.models.losses import resolve_loss
from fedsim.models.tasks import Task
from fedsim.protocol.messages import TrainRequest
from fedsim.simulation.engine import ShardFactory

if TYPE_CHECKING:
    from fedsim.secagg.identity import IdentityKey
    from fedsim.server.secure.helper import HelperRelease


def num_helpers(experiment: Experiment) -> int:
    """Return the number of helpers of secure aggregation in an experiment."""
    settings = experiment.secure_aggregation
    return 0 if settings is None else settings.helpers


RecordRelease: TypeAlias = "Callable[[int, HelperRelease], None]"
"""(helper, release) -> None: records a sum that a helper is about to release."""


def make_node_app(
    clients: BatchClientApp, experiment: ExperimentWithClients, base: Path
) -> ClientApp:
    """Return an app for all nodes: it acts as a client or as a helper, as the node's number says.

    Args:
        clients: the clients' app; returned unchanged if the federation has no helpers.
        experiment: the settings.
        base: the directory in which the experiment's relative paths start.
    """
    if not num_helpers(experiment):
        return clients
    return _NodeApp(clients, helper_app(experiment, base), experiment.num_clients)


def helper_app(
    experiment: ExperimentWithClients,
    base: Path,
    record: RecordRelease = lambda helper, release: None,
) -> ClientApp:
    """Return an app for the nodes that are helpers.

    Args:
        experiment: the settings, with secure aggregation.
        base: the directory in which the experiment's relative paths start.
        record: function of (helper, release) that writes each sum that a helper opens to the
            helper's disk. By default it writes nothing, as a simulation needs only the server's
            record.
    """
    from fedsim.federation.secure_setup import identity_of_helper
    from fedsim.server.secure.helper_app import make_helper_app

    settings, first = experiment.secure_aggregation, experiment.num_clients
    if settings is None:
        raise ValueError("an experiment without secure_aggregation has no helpers")

    def helper_number(context: Context) -> int:
        return partition_of(context) - first + 1

    def identity_of(context: Context) -> "IdentityKey | None":
        return identity_of_helper(
            settings, helper_number(context), base=base, node_config=context.node_config
        )

    def record_of(context: Context, release: "HelperRelease") -> None:
        record(helper_number(context), release)

    return make_helper_app(settings, helper_number, identity_of, record_of, first)


class _NodeApp(ClientApp):
    """App of clients and helpers, which answers several clients at once and helpers singly."""

    def __init__(self, clients: BatchClientApp, helper: ClientApp, num_clients: int) -> None:
        super().__init__()
        self._clients, self._helper = clients, helper
        self._num_clients = num_clients
        self.takes_batches = clients.takes_batches
        self.answer_batch = clients.answer_batch
        self.answer_requests = clients.answer_requests

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message as the node that the context names."""
        is_client = partition_of(context) < self._num_clients
        return (self._clients if is_client else self._helper)(message, context)


# Fields of a federation that are not sent to other processes: each process builds them.
_LOCAL_FIELDS = {"model", "journal", "data", "goal"}


def client_app(
    federation: Federation,
    *,
    in_process: bool,
    ledger: Path | None,
    block_of: BlockOf | None = None,
) -> ClientApp:
    """Return the ClientApp that all nodes of a federation run.

    Args:
        federation: the assembled federation.
        in_process: whether all nodes run in this process and share `federation`; otherwise each
            process builds a federation of its own.
        ledger: the file of the durable ledger; None without a durable ledger.
        block_of: function that returns the clients of this process that train together with a given
            client; None for the planned groups.
    """
    if in_process:
        return _app_in_process(federation, block_of or federation.blocks.plan.block_of)
    source = TaskSource(federation.experiment.model_dump_json(), federation.base, ledger)
    return FederationClientApp(federation, source)


def _app_in_process(federation: Federation, block_of: BlockOf) -> ClientApp:
    clients = BatchClientApp(federation.client_task, block_of=block_of)
    return make_node_app(clients, federation.experiment, federation.base)


@dataclass(frozen=True)
class TaskSource:
    """Callable object that builds a client's task in any process, from the experiment as JSON.

    The task is what the client needs to answer requests: data, settings, plan and model.

    Attributes:
        experiment: the experiment as JSON.
        base: the directory in which the experiment's relative paths start.
        ledger: the file of the durable ledger; None without a durable ledger.
    """

    experiment: str
    base: Path
    ledger: Path | None

    @property
    def settings(self) -> ExperimentWithClients:
        """The experiment, read from its JSON."""
        return ExperimentWithClients.model_validate_json(self.experiment)

    def __call__(self, client: int) -> ClientTask:
        """Return a client's task; the first call in a process assembles and probes a federation."""
        return _assembled(self).client_task(client)


@lru_cache(maxsize=1)
def _assembled(source: TaskSource) -> Federation:
    experiment = source.settings
    loaded = LoadedExperiment(experiment=experiment, path=None, base=source.base)
    federation = assemble(loaded, ledger=source.ledger)
    probe_mechanisms(federation)
    return federation


def client_app_from_source(source: TaskSource) -> ClientApp:
    """Return an app for all nodes, which builds the federation when the first request arrives."""
    return make_node_app(BatchClientApp(source), source.settings, source.base)


class FederationClientApp(ClientApp):
    """The ClientApp of a federation's nodes, which can be pickled and sent to other processes.

    A process that unpickles the app builds the whole federation from the experiment, as Flower's
    runtime needs. `shard` instead makes an app with the data of some clients only.

    Args:
        federation: the assembled federation.
        source: object that creates the clients' tasks in a process that unpickles the app.
    """

    def __init__(self, federation: Federation, source: TaskSource) -> None:
        super().__init__()
        self._federation = federation
        self._source = source

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message as the node that the context names."""
        return client_app_from_source(self._source)(message, context)

    def __reduce__(self) -> tuple[Any, ...]:
        return client_app_from_source, (self._source,)

    @property
    def ledger(self) -> Path | None:
        """The file of the durable ledger; None without privacy or without a durable ledger."""
        return None if self._federation.plan.clients is None else self._source.ledger

    def expected_work(self) -> list[float]:
        """Return the expected number of per-example gradients in the whole run, for each node."""
        federation = self._federation
        local, steps = federation.experiment.local, federation.plan.steps.whole_rounds
        rounds = federation.plan.participation.planned_rounds()
        clients = [
            float(planned * steps_of_round * local.expected_batch(size))
            for planned, steps_of_round, size in zip(
                rounds, steps, federation.data.clients.sizes, strict=True
            )
        ]
        return clients + [0.0] * num_helpers(federation.experiment)  # helpers compute no gradients

    def ranges(self) -> list[Sequence[int]]:
        """Return groups of nodes that share a worker: ranges of clients, and single helpers."""
        federation = self._federation
        helpers = range(federation.num_clients, federation.num_nodes)
        return [*federation.blocks.plan.ranges, *((helper,) for helper in helpers)]

    def first_of_block(self, client: int, message: Message) -> int:
        """Return the first client of the block (clients that train together) of a given client.

        Only train requests have blocks; for other messages, return the given client.
        """
        if message.metadata.message_type != MessageType.TRAIN:
            return client
        request = TrainRequest.from_message(message)
        return self._federation.blocks.plan.block_of(request.round_number, client)[0]

    def shard(self, clients: Sequence[int]) -> ShardFactory:
        """Return a picklable function that makes an app with the given clients and helpers only."""
        federation = self._federation
        rest = {
            field.name: getattr(federation, field.name)
            for field in fields(federation)
            if field.name not in _LOCAL_FIELDS
        }
        data = federation.data
        here = [client for client in clients if client < len(data.clients)]  # no helpers
        shard_data = replace(
            data,
            clients=data.clients.select(here),
            held_out=None if data.held_out is None else data.held_out.select(here),
            test=public_examples(data, NUM_PROBE_EXAMPLES),
        )
        queries = federation.goal.public_queries
        task, blocks = federation.model.task, federation.blocks.plan
        return _FederationShard(rest, shard_data, task, blocks, queries)


@dataclass(frozen=True)
class _FederationShard:
    rest: Mapping[str, Any]
    data: FederatedData
    task: Task
    blocks: BlockPlan  # of all clients, so that every process has the same blocks
    queries: Examples | None = None

    def __call__(self, journal: Journal | None) -> ClientApp:
        """Return the app of the clients, with a federation that holds their data only."""
        experiment, base = self.rest["experiment"], self.rest["base"]
        device = choose_device(experiment.runtime.device)
        loss = resolve_loss(experiment.model.loss, base=base)
        with one_thread():  # as the checks of the whole federation
            module = initial_model(experiment, self.data, self.task, base=base).to(device)
            examples = to_tensors(public_examples(self.data, NUM_CHECK_EXAMPLES), device)
            model = federation_model(experiment, module, loss, self.task, *examples)
        self.rest["sources"].refuse_edited(read_sources(experiment.plugins, base=base))
        classes = self.data.num_classes or 0
        goal, model = goal_of(experiment, self.queries, model, classes=classes)
        # A copy: arrays that Ray delivers are shared and read-only.
        federation = Federation(
            **self.rest,
            data=self.data.copy(),
            model=model,
            goal=goal,
            journal=cast("Any", journal),
        )
        probe_mechanisms(federation)
        return _app_in_process(federation, self.blocks.block_of)
