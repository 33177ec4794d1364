"""One client as a Flower ClientApp: the same code for every engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedsim.accountant.journal import Journal
from fedsim.clients.account import PrivacyAccount
from fedsim.clients.dp_sgd.per_example import PerExampleGradients, PerExampleLoss
from fedsim.clients.plan import PrivacyPlan
from fedsim.clients.settings import LocalSettings
from fedsim.clients.training import StreamKey, train_plain, train_private
from fedsim.clients.workbench import Workbench
from fedsim.server.protocol import (
    PARTITION,
    ROLL_CALL,
    PrivacyStatement,
    TrainReply,
    TrainRequest,
    roll_call_reply,
)


@dataclass(frozen=True)
class ClientTask:
    """Everything a client needs to train: its data, the model to fill, its settings.

    `bench` holds the model that clients of one process share and fill anew for each request.
    `privacy` None means training without differential privacy; with it, `gradients` computes the
    per-example gradients of that model under `loss`.
    """

    client: int
    seed: int
    features: Tensor
    targets: Tensor
    bench: Workbench
    loss: PerExampleLoss
    gradients: PerExampleGradients | None
    local: LocalSettings
    privacy: PrivacyPlan | None
    journal: Journal | None

    @property
    def examples(self) -> int:
        """The number of examples that the client says it has."""
        return self.privacy.examples if self.privacy else len(self.features)


def make_client_app(task_of: Callable[[int], ClientTask]) -> ClientApp:
    """Return the ClientApp whose client number comes from the node's `partition-id`.

    Args:
        task_of: gives the task of a client by its number; called once for each request.
    """
    app = ClientApp()

    @app.query(ROLL_CALL)
    def roll_call(message: Message, context: Context) -> Message:
        return roll_call_reply(partition_of(context), message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with one_thread():
            return answer(task_of(partition_of(context)), message, context)

    return app


def answer(task: ClientTask, message: Message, context: Context) -> Message:
    """Train for one request and return the reply.

    Guarantee: with `task.privacy`, the round is charged to the client's account, durably where
    there is a journal, before training starts; nothing private leaves uncharged.
    """
    request = TrainRequest.from_message(message)
    statement = _charge(task, request, context)
    return trained_reply(task, request, statement).to_message(message)


def trained_reply(
    task: ClientTask, request: TrainRequest, statement: PrivacyStatement | None
) -> TrainReply:
    """Train a client alone, after its charge, and return its answer."""
    task.bench.load(request.arrays)
    task.bench.restart()
    key = StreamKey(task.seed, task.client, request.round_number)
    data = (task.features, task.targets, task.local)
    if task.privacy is None or statement is None:
        train_plain(task.bench.model, task.loss, *data, key)
    else:
        train_private(
            _gradients(task),
            *data,
            task.privacy.step,
            key,
            steps=charged_steps(task, statement),
            secure=task.privacy.secure_noise,
        )
    arrays = task.bench.upload(request.arrays, private=task.privacy is not None)
    return TrainReply(arrays, task.examples, statement)


def charged_steps(task: ClientTask, statement: PrivacyStatement) -> range:
    """Return the numbers of the steps of this round, which is charged, over the client's life."""
    return range((statement.rounds - 1) * task.local.steps, statement.rounds * task.local.steps)


def _gradients(task: ClientTask) -> PerExampleGradients:
    if task.gradients is None:
        raise ValueError(f"client {task.client} has a privacy plan but no per-example gradients")
    return task.gradients


def _charge(task: ClientTask, request: TrainRequest, context: Context) -> PrivacyStatement | None:
    if task.privacy is None:
        return None
    account = PrivacyAccount.restore(context.state, client=task.client, journal=task.journal)
    account = account.charge(
        task.privacy,
        round_number=request.round_number,
        request=task.bench.load(request.arrays),
        steps=task.local.steps,
        state=context.state,
        journal=task.journal,
    )
    return account.statement(task.privacy)


def partition_of(context: Context) -> int:
    """Return the client that a node holds."""
    partition = context.node_config.get(PARTITION)
    if not isinstance(partition, int):
        raise ValueError(
            f"the node's configuration needs a whole-numbered {PARTITION!r}, got {partition!r}"
        )
    return partition


@contextmanager
def one_thread() -> Iterator[None]:
    """Train on one thread: the order of float32 sums must not depend on the machine's cores."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
