"""Flower apps for nodes in other processes, which build the federation or a part of it again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import Journal
from fedsim.clients.app import BatchClientApp, one_thread
from fedsim.clients.task import ClientTask
from fedsim.core.plugin_sources import read_sources
from fedsim.data import Examples, FederatedData
from fedsim.experiment import ExperimentWithClients, LoadedExperiment
from fedsim.federation.apps import client_app, make_node_app, num_helpers
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

# Fields of a federation that are not sent to other processes: each process builds them.
_LOCAL_FIELDS = {"model", "journal", "data", "goal"}


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
    _check_process(federation)
    return federation


def _check_process(federation: Federation) -> None:
    """Check that a process may train the clients of a federation.

    Raises:
        MechanismMismatchError: a mechanism adds less noise here than it is charged for.
        ValueError: private clients have no ledger on disk, so this process could forget charges.
    """
    probe_mechanisms(federation)
    if federation.plan.clients is not None and federation.journal is None:
        raise ValueError("a private client in another process needs a ledger on disk, got none")


def client_app_from_source(source: TaskSource) -> ClientApp:
    """Return an app for all nodes, which builds the federation when the first request arrives."""
    return make_node_app(BatchClientApp(source), source.settings, source.base)


class FederationClientApp(ClientApp):
    """The ClientApp of a federation's nodes, which can be pickled and sent to other processes.

    A process that unpickles the app builds the whole federation from the experiment, as Flower's
    runtime needs. `shard` instead makes an app with the data of some clients only.

    Args:
        federation: the assembled federation.
        ledger: the file of the durable ledger; None without a durable ledger.
    """

    def __init__(self, federation: Federation, ledger: Path | None) -> None:
        super().__init__()
        self._federation = federation
        experiment = federation.experiment.model_dump_json()
        self._source = TaskSource(experiment, federation.base, ledger)

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
        _check_process(federation)
        return client_app(federation, self.blocks.block_of)
