"""Flower ClientApp for all clients of one process, the same in simulations and deployments.

A single message goes through Flower's `ClientApp.__call__`, and so through the app's mods. A
simulation engine passes many requests at once to `answer_batch`, unless the app has mods. Both ways
call `client_round.answer_rounds`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fedsim.clients.client_round import Answer, BlockOf, ClientRequest, alone, answer_rounds
from fedsim.clients.faults import ClientFailureError
from fedsim.clients.task import ClientTask
from fedsim.core.plugin_errors import contained_exits
from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.messages import STAGES, EvaluateReply, EvaluateRequest, TrainRequest
from fedsim.protocol.node_registration import (
    NODE_REGISTRATION,
    PARTITION,
    NodeIdentity,
    registration_reply,
)

Request = tuple[Message, Context]

AnswerGroup = Iterable[Message | Exception]
"""Answers of the clients of one block; the exception that a client raised replaces its answer."""


@runtime_checkable
class BatchAnswers(Protocol):
    """Interface of an app that can answer many train requests at once."""

    @property
    def takes_batches(self) -> bool:
        """Whether a simulation engine may pass many messages at once to `answer_batch`."""
        ...

    def answer_batch(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
        """Yield the answers to train requests in groups, in the order of the requests.

        Each group is an iterator over the answers of clients that train together. They train while
        the iterator is read. Read each iterator to its end before the next one.

        Guarantee: each answer equals the app's reply to a call with the message alone.

        Args:
            requests: the train requests of one round, in ascending order of clients.
        """
        ...

    def answer_requests(
        self, requests: Iterable[tuple[TrainRequest, Context]]
    ) -> Iterator[Iterator[Answer]]:
        """Yield the same answers as `answer_batch`, for requests that are not Flower messages.

        Args:
            requests: pairs of a train request and its client's context, as in `answer_batch`.
        """
        ...


class BatchClientApp(ClientApp):
    """Flower ClientApp for all clients of one process.

    The number of a message's client is `partition-id` in the node's configuration.

    Args:
        task_of: function that returns data, model and settings of a client from its number; called
            once per request.
        block_of: function of (round, client) that returns the clients that are planned to train
            together with the client, ascending. By default each client trains alone.
        mods: Flower mods for every message; with mods, messages are answered one at a time.
    """

    def __init__(
        self,
        task_of: Callable[[int], ClientTask],
        *,
        block_of: BlockOf = alone,
        mods: Sequence[Mod] = (),
    ) -> None:
        super().__init__(mods=list(mods))
        self._task_of = task_of
        self._block_of = block_of
        # A subclass that overrides `__call__` must see every message, as a mod must.
        self.takes_batches = not mods and type(self).__call__ is ClientApp.__call__
        self.query(NODE_REGISTRATION)(_answer_registration)
        self.train()(self._train)
        self.evaluate()(self._evaluate)
        for stage in STAGES:
            self.query(stage)(_stage_handler(stage, task_of))

    def answer_batch(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
        """Yield the answers to train requests in the order of the requests, one group per block.

        A block is the clients that train together. A group is an iterator over their answers.

        Guarantee: all charges of a block are on disk before the block trains. Each answer equals
        the reply that the app gives when called with the message alone.

        Args:
            requests: the train requests of one round, in ascending order of clients.
        """
        messages = (message for message, _ in requests)
        read = ((_read_request(message), context) for message, context in requests)
        for group in self.answer_requests(read):
            yield map(to_message, group, messages)

    def answer_requests(
        self, requests: Iterable[tuple[TrainRequest | ProtocolError, Context]]
    ) -> Iterator[Iterator[Answer]]:
        """Yield the same answers as `answer_batch`, for requests that are not Flower messages.

        Args:
            requests: pairs of a train request, or the error of one that cannot be read, and its
                client's context, all of one round, in ascending order of clients.
        """
        with one_thread():
            yield from answer_rounds(self._request_of(*request) for request in requests)

    def _request_of(
        self, request: TrainRequest | ProtocolError, context: Context
    ) -> ClientRequest | Exception:
        """Return the request to the client of a node, or the error that answers it."""
        try:
            client = partition_of(context)
            with contained_exits():
                task = self._task_of(client)
        except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
            return error
        try:
            if isinstance(request, ProtocolError):
                raise request
            block = self._block_of(request.round_number, client)
            if client not in block:
                raise ValueError(f"client {client} is not in its planned block {block}")
        except Exception as error:  # noqa: BLE001  likewise
            return task.failure(error)
        return ClientRequest(task, request, context, block)

    def _train(self, message: Message, context: Context) -> Message:
        (answer,) = chain.from_iterable(self.answer_batch([(message, context)]))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _evaluate(self, message: Message, context: Context) -> Message:
        with contained_exits():
            task = self._task_of(partition_of(context))
        with one_thread():
            try:
                with contained_exits():
                    return evaluate_and_reply(task, message)
            except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
                answer = to_message(task.failure(error), message)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _read_request(message: Message) -> TrainRequest | ProtocolError:
    try:
        return TrainRequest.from_message(message)
    except ProtocolError as error:
        return error


def _answer_registration(message: Message, context: Context) -> Message:
    return registration_reply(NodeIdentity(partition_of(context)), message)


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


def to_message(answer: Answer, request: Message) -> Message | Exception:
    """Turn a client's answer into the reply to a Flower message.

    A `ClientFailureError` becomes an error reply, so that its reason is the same on every engine
    and no engine drops the client's state. Any other exception is returned unchanged.

    Args:
        answer: the client's reply, or the exception that it raised.
        request: the message to reply to.
    """
    if isinstance(answer, ClientFailureError):
        return Message(Error(code=answer.code, reason=str(answer)), reply_to=request)
    return answer if isinstance(answer, Exception) else answer.to_message(request)


def evaluate_and_reply(task: ClientTask, message: Message) -> Message:
    """Evaluate a model on the client's held-out examples and return the reply.

    Guarantee: a client with differential privacy or secure aggregation refuses every request. A
    score would be a release about the client's examples that was not charged.

    Args:
        task: the client's data, model and settings.
        message: an evaluate request, which holds the model.

    Raises:
        ClientFailureError: the client does not evaluate, or an injected fault occurs in this round.
    """
    score = task.scores.evaluate
    if task.privacy is not None or task.secure is not None or score is None:
        raise ClientFailureError("does not evaluate models on its examples")
    request = EvaluateRequest.from_message(message)
    fault = task.faults.of(task.client, request.round_number)
    fault.before_charge()
    fault.after_charge()  # a client that drops out after its charge does not answer here
    examples, metrics = score(request.arrays)
    return EvaluateReply(examples, metrics, delay=fault.delay).to_message(message)


def partition_of(context: Context) -> int:
    """Return the number of the client that runs on a node.

    Raises:
        ValueError: the node's configuration has no whole number `partition-id`.
    """
    partition = context.node_config.get(PARTITION)
    if not isinstance(partition, int):
        raise ValueError(
            f"the node's configuration needs a whole-numbered {PARTITION!r}, got {partition!r}"
        )
    return partition


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread during a `with` block.

    The order of float32 sums, and so their bits, must not depend on the number of cores.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
