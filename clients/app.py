"""One client as a Flower ClientApp: the same code for every engine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedsim.accountant.ledger.journal import Journal
from fedsim.clients.account import ClientBudgetExhaustedError, PrivacyAccount
from fedsim.clients.budget.plan import PrivacyPlan
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleGradients, PerExampleLoss
from fedsim.clients.failure_text import ClientFailureError, redact_error
from fedsim.clients.faults.injection import NO_FAULTS, Fault, FaultPlan
from fedsim.clients.secure.channel import STAGES, SecureChannel
from fedsim.clients.settings import LocalSettings
from fedsim.clients.training.local_training import StreamKey, train_plain, train_private
from fedsim.clients.training.shared_model import SharedModel
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.messages import (
    EvaluateReply,
    EvaluateRequest,
    TrainReply,
    TrainRequest,
    Withdrawal,
)
from fedsim.protocol.roll_call import PARTITION, ROLL_CALL, NodeIdentity, roll_call_reply

# Scores a model on the client's held-out examples: their number, and metrics by name.
Evaluate = Callable[[ArrayRecord], tuple[int, Mapping[str, float]]]


@dataclass(frozen=True)
class ClientTask:
    """Everything a client needs to train: its data, the shared model, its settings.

    Attributes:
        client: its number.
        seed: the experiment's seed.
        size: its number of examples.
        data: returns features and targets (n, ...); called when the client trains, so that a
            waiting task holds no copy of them.
        shared_model: the model of the process, filled anew for each request.
        loss: one value per example.
        gradients: clipped sums of per-example gradients under `loss`; None without privacy.
        local: steps, batch size and optimizer.
        privacy: the client's plan; None: training without differential privacy.
        journal: the durable ledger; None: charges are kept in the client's state alone.
        evaluate: scores a model on held-out examples; None: the client refuses to.
        faults: faults to inject.
        secure: seals updates; None: they are sent in clear.
        measure: the declared metrics of a model on the client's examples; None: there are none.
            Always None under privacy, whose noise does not cover them.
    """

    client: int
    seed: int
    size: int
    data: Callable[[], tuple[Tensor, Tensor]]
    shared_model: SharedModel
    loss: PerExampleLoss
    gradients: PerExampleGradients | None
    local: LocalSettings
    privacy: PrivacyPlan | None
    journal: Journal | None
    evaluate: Evaluate | None = None
    faults: FaultPlan = NO_FAULTS
    secure: SecureChannel | None = None
    measure: Callable[[nn.Module], Mapping[str, float]] | None = None

    def check_examples(self) -> None:
        """Check that the public number of examples is not 0.

        Where the client's size is private, an empty client trains on empty lots.

        Raises:
            ClientFailureError: the client has no examples.
        """
        if self.examples == 0:
            raise ClientFailureError("has no examples")

    def step(self, request: TrainRequest) -> DpSgdMechanism | None:
        """Return the mechanism of a request, with the clipping bound in it; None without privacy.

        Guarantee: its event is that of the plan, whatever the request holds.

        Raises:
            ClientFailureError: clipping cannot have adapted to the request's bound.
        """
        if self.privacy is None:
            return None
        try:
            return self.privacy.step.resume(request.clip_norm)
        except ValueError as error:
            raise ClientFailureError(f"refuses the request: {error}") from error

    @property
    def examples(self) -> int:
        """The public number of examples: the planned one under privacy, else `size`."""
        return self.privacy.examples if self.privacy else self.size


def make_client_app(task_of: Callable[[int], ClientTask]) -> ClientApp:
    """Return the ClientApp whose client number comes from the node's `partition-id`.

    Args:
        task_of: returns the task of a client by its number; called once for each request.
    """
    app = ClientApp()

    @app.query(ROLL_CALL)
    def roll_call(message: Message, context: Context) -> Message:
        return roll_call_reply(NodeIdentity(partition_of(context)), message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with one_thread():
            task = task_of(partition_of(context))
            try:
                return answer_train_request(task, message, context)
            except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
                return failure_reply(error, message, private=task.privacy is not None)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        with one_thread():
            task = task_of(partition_of(context))
            try:
                return evaluate_and_reply(task, message)
            except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
                return failure_reply(error, message, private=task.privacy is not None)

    for stage in STAGES:
        app.query(stage)(_stage_handler(stage, task_of))
    return app


def _stage_handler(
    stage: str, task_of: Callable[[int], ClientTask]
) -> Callable[[Message, Context], Message]:
    """Return the handler of one stage of secure aggregation by pairwise masks."""

    def respond(message: Message, context: Context) -> Message:
        task = task_of(partition_of(context))
        if task.secure is None:
            raise ClientFailureError("this client's experiment has no secure_aggregation")
        return task.secure.answer(stage, task.client, message, context)

    return respond


def failure_reply(error: Exception, request: Message, *, private: bool) -> Message:
    """Return the error reply of a failed client.

    A reply and not an exception: the reason then reads the same on every engine, and no engine
    throws the client's state away.

    Args:
        error: what the client raised.
        request: the message that it could not answer.
        private: whether the error's text must stay in the client.

    Raises:
        Exception: `error` itself, where it is not an error of a client.
    """
    if private:
        error = redact_error(error)
    if isinstance(error, ClientFailureError):
        return Message(Error(code=0, reason=str(error)), reply_to=request)
    raise error


def answer_train_request(task: ClientTask, message: Message, context: Context) -> Message:
    """Train for one request and return the reply.

    A client takes as many steps as its budget affords; if it affords none, the client withdraws.

    Guarantee: with `task.privacy`, the round is charged to the client's account, durably where
    there is a journal, before training starts; nothing private leaves uncharged.

    Raises:
        ClientFailureError: the client has no examples, or a fault strikes it.
    """
    request = TrainRequest.from_message(message)
    fault = task.faults.of(task.client, request.round_number)
    fault.before_charge()
    task.check_examples()
    try:
        spend = _charge(task, request, context)
    except ClientBudgetExhaustedError as error:
        return Withdrawal(task.client, str(error)).to_message(message)
    reply = train_and_reply(task, request, spend, fault)
    return seal_reply(task, request, reply, message, context)


def evaluate_and_reply(task: ClientTask, message: Message) -> Message:
    """Score a model on the client's held-out examples and return the reply.

    Guarantee: a client with a privacy plan, or with sealed updates, refuses every request: a score
    is a release about its examples that was not charged.

    Raises:
        ClientFailureError: the client does not evaluate, or a fault strikes it in this round.
    """
    if task.privacy is not None or task.secure is not None or task.evaluate is None:
        raise ClientFailureError("does not evaluate models on its examples")
    request = EvaluateRequest.from_message(message)
    fault = task.faults.of(task.client, request.round_number)
    fault.before_charge()
    fault.after_training()  # a client that drops out there does not answer here
    examples, metrics = task.evaluate(request.arrays)
    return EvaluateReply(examples, metrics, delay=fault.delay).to_message(message)


def seal_reply(
    task: ClientTask, request: TrainRequest, reply: TrainReply, message: Message, context: Context
) -> Message:
    """Return a client's reply as a message, sealed under secure aggregation.

    Raises:
        ClientFailureError: the update cannot be sealed.
    """
    if task.secure is None:
        return reply.to_message(message)
    digest = task.shared_model.load(request.arrays)
    metrics: Mapping[str, float] = {}
    if task.measure is not None:
        task.shared_model.restart()  # the model of the request, not the trained one
        metrics = task.measure(task.shared_model.model)
    sealed = task.secure.seal(
        task.client, request, reply, model_digest=digest, metrics=metrics, context=context
    )
    return sealed.to_message(message)


def train_and_reply(
    task: ClientTask, request: TrainRequest, spend: ClientSpend | None, fault: Fault
) -> TrainReply:
    """Train a client alone, after its charge, and return its reply.

    Args:
        task: the client.
        request: the model and the round.
        spend: the client's spend after the charge; None without privacy.
        fault: the fault of this round.
    """
    task.shared_model.load(request.arrays)
    task.shared_model.restart()
    key = StreamKey(task.seed, task.client, request.round_number)
    data = (*task.data(), task.local)
    steps = steps_to_take(task, spend, fault)
    adapted_clip_norm, step = None, task.step(request)
    if task.privacy is None or step is None:
        train_plain(task.shared_model.model, task.loss, *data, key, steps=steps)
    else:
        secure = task.privacy.secure_noise
        step = train_private(_gradients(task), *data, step, key, steps=steps, secure=secure)
        adapted_clip_norm = step.clipping.adapted_clip_norm
    arrays = task.shared_model.upload(request.arrays, private=task.privacy is not None)
    return build_reply(task, arrays, spend, fault, adapted_clip_norm=adapted_clip_norm)


def build_reply(
    task: ClientTask,
    arrays: ArrayRecord,
    spend: ClientSpend | None,
    fault: Fault,
    *,
    adapted_clip_norm: float | None = None,
) -> TrainReply:
    """Return the reply of a client that has trained, altered by the fault.

    Args:
        task: the client.
        arrays: the trained model.
        spend: the client's spend after the charge; None without privacy.
        fault: the fault of this round.
        adapted_clip_norm: the adapted clipping bound; None where it is fixed.
    """
    fault.after_training()
    return TrainReply(
        fault.alter_upload(arrays),
        task.examples,
        spend,
        delay=fault.delay,
        clip_norm=adapted_clip_norm,
    )


def steps_to_take(task: ClientTask, spend: ClientSpend | None, fault: Fault) -> range:
    """Return the numbers of the steps to take, less those that the fault drops.

    Under privacy they are the steps charged in this round, counted over the client's life.
    """
    if spend is None:
        return fault.steps_to_train(range(task.local.steps))
    return fault.steps_to_train(range(spend.steps - spend.round_steps, spend.steps))


def _gradients(task: ClientTask) -> PerExampleGradients:
    if task.gradients is None:
        raise ValueError(f"client {task.client} has a privacy plan but no per-example gradients")
    return task.gradients


def _charge(task: ClientTask, request: TrainRequest, context: Context) -> ClientSpend | None:
    if task.privacy is None:
        return None
    account = PrivacyAccount.restore(
        context.state, task.privacy, client=task.client, journal=task.journal
    )
    account = account.charge(
        round_number=request.round_number,
        request=request_digest(task, request),
        steps=task.local.steps,
        state=context.state,
        journal=task.journal,
    )
    return account.spend


def request_digest(task: ClientTask, request: TrainRequest) -> str:
    """Return the digest of everything that the answer to a request depends on.

    Raises:
        ClientFailureError: the client cannot answer the request, see `ClientTask.step`.
    """
    task.step(request)
    return request.digest(task.shared_model.load(request.arrays))


def partition_of(context: Context) -> int:
    """Return the number of the client on this node.

    Raises:
        ValueError: the node's configuration has no whole number for it.
    """
    partition = context.node_config.get(PARTITION)
    if not isinstance(partition, int):
        raise ValueError(
            f"the node's configuration needs a whole-numbered {PARTITION!r}, got {partition!r}"
        )
    return partition


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: the order of float32 sums must not depend on the cores."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
