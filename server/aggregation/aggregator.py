"""How the updates of a round become the next model: the part of a strategy that can be exchanged.

A strategy asks clients, keeps the book and knows who failed. An `Aggregator` adds the updates up,
in clear (`PlainAggregator`) or securely (`fedsim.server.secure.aggregator`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedsim.core.errors import FedsimError
from fedsim.protocol.messages import PrivacyStatement, TrainReply, to_arrays, to_numpy
from fedsim.server.aggregation.mean import OrderedMean

Weighting = Literal["uniform", "examples"]


class RoundAbortedError(FedsimError):
    """A round that was given up; no update of it may become part of the model."""


class ClientAnswer(Protocol):
    """What every answer of a client says beside its update."""

    @property
    def privacy(self) -> PrivacyStatement | None:
        """The client's privacy statement, in a private federation."""
        ...

    @property
    def delay(self) -> float:
        """How late it is, in simulated seconds."""
        ...

    @property
    def clip_norm(self) -> float | None:
        """The bound that the client's clipping has learnt, where it learns."""
        ...


A = TypeVar("A", bound=ClientAnswer)


@dataclass(frozen=True)
class AggregationResult:
    """What came of a round.

    Attributes:
        arrays: the next model; None: it stays as it was.
        lost: clients whose update was taken and is not part of it after all, and why.
        metrics: means of the metrics that clients declared.
        clipped: values of updates that were clipped before they were averaged.
        clipped_metrics: clients that clipped a metric.
    """

    arrays: ArrayRecord | None
    lost: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    clipped: int = 0
    clipped_metrics: int = 0


class Aggregator(ABC, Generic[A]):
    """Averages the updates of one round after another.

    Every client of a round is either added or skipped, once, between `begin` and `finish`.
    `retried` counts the questions of the last round that had to be asked again.
    """

    name: str = ""
    retried: int = 0

    @abstractmethod
    def begin(
        self, round_number: int, arrays: ArrayRecord, clients: Sequence[int], grid: Grid
    ) -> ConfigRecord | None:
        """Begin a round from `arrays`; return what the train requests must carry beside them.

        Raises:
            RoundAbortedError: nobody need be asked, for nothing could come of it.
        """

    @abstractmethod
    def read(self, reply: Message) -> A:
        """Read a client's answer.

        Raises:
            ProtocolError: it is malformed.
        """

    @abstractmethod
    def add(self, client: int, answer: A) -> None:
        """Take the update of a client.

        Raises:
            InvalidUpdateError: it must not be averaged in; the client is then skipped.
        """

    @abstractmethod
    def skip(self, client: int) -> None:
        """Go on without a client."""

    @abstractmethod
    def finish(self) -> AggregationResult:
        """Return what came of the round.

        Raises:
            RoundAbortedError: the updates cannot be averaged; the model stays.
        """


class PlainAggregator(Aggregator[TrainReply]):
    """The weighted mean of updates that the server sees."""

    def __init__(self, weighting: Weighting) -> None:
        self.name = f"{weighting} weights"
        self._weighting = weighting
        self._mean: OrderedMean | None = None

    def begin(
        self, round_number: int, arrays: ArrayRecord, clients: Sequence[int], grid: Grid
    ) -> ConfigRecord | None:
        """Begin a round; requests carry nothing else."""
        self._mean = OrderedMean(clients, to_numpy(arrays))
        return None

    def read(self, reply: Message) -> TrainReply:
        """Read a client's answer."""
        return TrainReply.from_message(reply)

    def add(self, client: int, answer: TrainReply) -> None:
        """Add a client's model with its weight."""
        weight = float(answer.examples) if self._weighting == "examples" else 1.0
        self._current.add(client, to_numpy(answer.arrays), weight)

    def skip(self, client: int) -> None:
        """Go on without a client."""
        self._current.skip(client)

    def finish(self) -> AggregationResult:
        """Return the mean; no model where no client with a positive weight was added."""
        mean, self._mean = self._current.result(), None
        return AggregationResult(None if mean is None else to_arrays(mean))

    @property
    def _current(self) -> OrderedMean:
        if self._mean is None:
            raise RuntimeError("no round was begun")
        return self._mean
