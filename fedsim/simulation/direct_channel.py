"""Train requests to clients of this process as function calls, without messages and records."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, runtime_checkable

from flwr.app import ArrayRecord, Context

from fedsim.clients.client_round import Answer
from fedsim.clients.faults import ClientFailureError
from fedsim.core.plugin_errors import error_text, type_name
from fedsim.protocol.arrays import live_record
from fedsim.protocol.channel import TrainAnswer
from fedsim.protocol.exchange import ClientError
from fedsim.protocol.messages import TrainRequest

logger = logging.getLogger(__name__)


@runtime_checkable
class DirectAnswers(Protocol):
    """An app that answers train requests without messages."""

    @property
    def takes_batches(self) -> bool:
        """Whether the app need not see messages."""
        ...

    def answer_requests(
        self, requests: Iterable[tuple[TrainRequest, Context]]
    ) -> Iterator[Iterator[Answer]]:
        """Yield groups of answers, in the order of the requests."""
        ...


@dataclass(frozen=True)
class DirectChannel:
    """A channel to the clients of this process.

    Attributes:
        app: of every client.
        contexts: of every node, by node id.
    """

    app: DirectAnswers
    contexts: Mapping[int, Context]

    def train(
        self, requests: Mapping[int, TrainRequest], *, timeout: float | None = None
    ) -> Iterator[tuple[int, TrainAnswer]]:
        """Yield node and answer of each client, in the order of the requests.

        Args:
            requests: one for each node, by node id, in ascending order of clients.
            timeout: ignored: it cannot interrupt a client of the same process.
        """
        live = LiveArrayCache()
        asked = (
            (replace(request, arrays=live.of(request.arrays)), self.contexts[node])
            for node, request in requests.items()
        )
        answers = chain.from_iterable(self.app.answer_requests(asked))
        for node, answer in zip(requests, answers, strict=True):
            yield node, _without_exception(node, answer)


class LiveArrayCache:
    """Caches the live arrays of the last record, which many requests share."""

    def __init__(self) -> None:
        self._last: tuple[ArrayRecord, ArrayRecord] | None = None

    def of(self, record: ArrayRecord) -> ArrayRecord:
        """Return the record with read-only arrays in memory, shared by all callers."""
        if self._last is None or self._last[0] is not record:
            values = {name: array.numpy() for name, array in record.items()}
            self._last = record, live_record(values)
        return self._last[1]


def failure_reason(node: int, error: Exception) -> str:
    """Log what the app of a node raised, and return the reason of its failure."""
    logger.debug("node %d raised", node, exc_info=error)
    return f"{type_name(error)}: {error_text(error)}"


def _without_exception(node: int, answer: Answer) -> TrainAnswer:
    if isinstance(answer, ClientFailureError):
        return ClientError(str(answer), answer.code)
    if isinstance(answer, Exception):
        return ClientError(failure_reason(node, answer))
    return answer
