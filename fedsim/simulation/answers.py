"""Answers of the clients of one process: by groups if the app can, else one at a time."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp

from fedsim.clients.app import AnswerGroup, BatchAnswers
from fedsim.core.plugin_errors import contained_exits

_Answer = TypeVar("_Answer")


def answer_requests(
    app: ClientApp, requests: Sequence[tuple[Message, Context]]
) -> Iterator[AnswerGroup]:
    """Yield groups of answers, in the order of the requests.

    An app with Flower mods, and any app that is not one of fedsim, is called with each message.

    Args:
        app: the clients' app.
        requests: messages of one kind, each with the context of its client.
    """
    train = bool(requests) and requests[0][0].metadata.message_type == MessageType.TRAIN
    if isinstance(app, BatchAnswers) and app.takes_batches and train:
        yield from app.answer_batch(requests)
        return
    for message, context in requests:
        try:
            with contained_exits():
                answer: Message | Exception = app(message, context)
        except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
            answer = error
        yield [answer]


def chunk_by_time(
    groups: Iterable[Iterable[_Answer]],
    count: int,
    *,
    chunk_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[list[_Answer], float]]:
    """Yield chunks of answers and the seconds of each chunk.

    A chunk ends with the group in which its time runs out, so that the receiver can process it
    while the next group is computed.

    Args:
        groups: groups of answers.
        count: number of all answers; the last answer ends the last chunk.
        chunk_seconds: least time of a chunk, except the last.
        clock: returns the time in seconds.
    """
    chunk: list[_Answer] = []
    start, left = clock(), count
    for group in groups:
        chunk += group
        seconds = clock() - start
        if chunk and (len(chunk) == left or seconds >= chunk_seconds):
            left -= len(chunk)
            yield chunk, seconds
            chunk, start = [], clock()
