"""How clients of one process answer: at once where their app can, else one after the other."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp

from fedsim.clients.batch_app import AnswerGroup, BatchAnswers

A = TypeVar("A")


def answers_of(
    app: ClientApp, requests: Sequence[tuple[Message, Context]]
) -> Iterator[AnswerGroup]:
    """Yield the answers to the requests, in their order, together where they come together.

    Args:
        app: the clients.
        requests: messages of one kind, with the contexts of the clients that they are for.
    """
    train = bool(requests) and requests[0][0].metadata.message_type == MessageType.TRAIN
    if isinstance(app, BatchAnswers) and train:
        yield from app.answer_batch(requests)
        return
    for message, context in requests:
        try:
            answer: Message | Exception = app(message, context)
        except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
            answer = error
        yield [answer]


def in_parts(
    groups: Iterable[Iterable[A]],
    count: int,
    *,
    every: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[list[A], float]]:
    """Yield answers on their way in parts of whole groups, and the seconds that each part took.

    A part ends with the group in which its time is over, before work on the next one begins: who
    waits for these answers has something to do meanwhile.

    Args:
        groups: answers as they come.
        count: how many there will be; the last part ends with the last of them.
        every: seconds that a part should take.
        clock: in seconds.
    """
    found: list[A] = []
    started, left = clock(), count
    for group in groups:
        found += group
        seconds = clock() - started
        if found and (len(found) == left or seconds >= every):
            left -= len(found)
            yield found, seconds
            found, started = [], clock()
