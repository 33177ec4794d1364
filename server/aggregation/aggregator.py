"""Aggregators: objects that turn the client updates of a round into their weighted mean.

`PlainAggregator` sees every single update; `fedsim.server.secure.aggregator` sees only the sum.

Floating-point addition is not associative, so an average in order of arrival differs from run to
run. `OrderedMean` therefore adds updates to a float64 sum in an order that is fixed before the
round. An update that arrives before its turn waits in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedsim.core.errors import FedsimError
from fedsim.protocol.arrays import to_arrays, to_numpy, upload_base
from fedsim.protocol.messages import SealedReply, TrainReply
from fedsim.server.aggregation.weights import ClientWeights, WeightingError

Arrays = Mapping[str, np.ndarray]


class InvalidUpdateError(FedsimError, ValueError):
    """Error for an update that is not accepted; the message names the array and the fault."""


def check_update(update: Arrays, reference: Arrays) -> None:
    """Check that an update is finite and has the layout of the global model; raise if not.

    Args:
        update: the client's arrays by name, in the order of the global model.
        reference: the global model, arrays by name.

    Raises:
        InvalidUpdateError: a name, dtype or shape differs, or a value is NaN or infinite.
    """
    if list(update) != list(reference):
        missing = [name for name in reference if name not in update]
        extra = [name for name in update if name not in reference]
        raise InvalidUpdateError(f"arrays differ: missing {missing}, unexpected {extra}")
    for name, value in update.items():
        expected = reference[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise InvalidUpdateError(
                f"array {name!r} must be {expected.dtype}{list(expected.shape)}, "
                f"got {value.dtype}{list(value.shape)}"
            )
        if np.count_nonzero(np.isfinite(value)) < value.size:
            raise InvalidUpdateError(f"array {name!r} has NaN or infinite values")


class OrderedMean:
    """Weighted mean of client updates that does not depend on their order of arrival.

    Call `add` or `skip` once for each client of `order`. The result has the dtypes of `reference`;
    integer arrays (counters such as `num_batches_tracked`) are rounded.

    Args:
        order: the clients of the round, in the order in which they are summed.
        reference: the global model, arrays by name.
    """

    def __init__(self, order: Sequence[int], reference: Arrays) -> None:
        self._order = list(order)
        self._expected = set(order)
        self._reference = reference
        self._position = 0
        self._waiting: dict[int, tuple[Arrays, float] | None] = {}
        self._sums: dict[str, np.ndarray] | None = None
        self._product: dict[str, np.ndarray] = {}
        self._weight = 0.0

    def add(self, client: int, update: Arrays, weight: float) -> None:
        """Add a client's model to the mean.

        Args:
            client: a client of `order`.
            update: the client's model, arrays by name.
            weight: the client's weight in the mean, ≥ 0.

        Raises:
            InvalidUpdateError: the model has a wrong layout or a value that is not finite; the
                client is then skipped.
            ValueError: the client is not in the order, or was added or skipped before.
        """
        try:
            check_update(update, self._reference)
        except InvalidUpdateError:
            self.skip(client)
            raise
        self._arrive(client, (update, weight))

    def skip(self, client: int) -> None:
        """Leave a client that failed or did not reply out of the mean."""
        self._arrive(client, None)

    def result(self) -> dict[str, np.ndarray] | None:
        """Return the mean, or None when no client with a positive weight was added.

        Raises:
            ValueError: a client of the order was neither added nor skipped.
        """
        if self._position < len(self._order):
            raise ValueError(f"clients {self._order[self._position :]} neither added nor skipped")
        if self._sums is None or self._weight <= 0:
            return None
        mean = {name: total / self._weight for name, total in self._sums.items()}
        return {name: _cast(value, self._reference[name].dtype) for name, value in mean.items()}

    def _arrive(self, client: int, entry: tuple[Arrays, float] | None) -> None:
        if client not in self._expected:
            raise ValueError(f"client {client} is not in the order, or was added or skipped before")
        self._expected.remove(client)
        self._waiting[client] = entry
        while self._position < len(self._order):
            client = self._order[self._position]
            if client not in self._waiting:
                return
            self._accumulate(self._waiting.pop(client))
            self._position += 1

    def _accumulate(self, entry: tuple[Arrays, float] | None) -> None:
        if entry is None:
            return
        update, weight = entry
        if self._sums is None:
            self._sums = {
                name: np.zeros(value.shape, np.float64) for name, value in self._reference.items()
            }
            self._product = {name: np.empty_like(total) for name, total in self._sums.items()}
        for name, total in self._sums.items():
            if weight == 1.0:
                total += update[name]
            else:
                product = self._product[name]
                total += np.multiply(update[name], weight, out=product, dtype=np.float64)
        self._weight += weight


def _cast(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    rounded = value if np.issubdtype(dtype, np.floating) else np.rint(value)
    return np.asarray(rounded, dtype=dtype)  # a mean without dimensions is no array


class RoundAbortedError(FedsimError):
    """Error that aborts a round: none of its updates may become part of the model."""


ClientAnswer = TrainReply | SealedReply
"""A client's reply that has an update, in clear or sealed."""

A = TypeVar("A", TrainReply, SealedReply)


@dataclass(frozen=True)
class AggregationResult:
    """Aggregate of the client updates of one round.

    Attributes:
        arrays: the weighted mean of the client models; None if no client is in the aggregate.
        lost: for each client that was added but is missing from the aggregate, the reason.
        metrics: the mean of each declared metric, by name.
        clipped: number of update values that were clipped before the sum.
        clipped_metrics: number of clients that clipped a metric.
        sums: the exact sums of the clients' integers, int64 by name. The value is None if clients
            send no integers, or if no client is in the aggregate.
        clip_count: the noisy count that updates the adaptive clip norm, in grid steps (a step is
            the value of the integer 1 in the sum). None if the clip norm is fixed.
        models: the arrays of all n clients' models, stacked (n, ...) by name, ascending by client;
            empty if single models are not kept.
    """

    arrays: ArrayRecord | None
    lost: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    clipped: int = 0
    clipped_metrics: int = 0
    sums: Mapping[str, np.ndarray] | None = None
    clip_count: int | None = None
    models: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def values(self) -> Mapping[str, np.ndarray]:
        """Arrays of the aggregate by name; empty if no client is in the aggregate."""
        return {} if self.arrays is None else to_numpy(self.arrays)


class Aggregator(ABC, Generic[A]):
    """Base class of objects that aggregate the client updates of a round.

    An aggregator serves every round of a run. Between `begin` and `finish`, call `add` or `skip`
    once for each client of the round.

    Attributes:
        reply_type: the class of the clients' answers.
        name: the aggregator's name in logs.
        retried: number of queries that the server had to repeat in the last round.
        declared_metrics: names of the metrics in a secure sum; None without secure aggregation.
        ends_run_on_abort: whether an aborted round ends the run.
    """

    reply_type: type[A]
    name: str = ""
    retried: int = 0
    declared_metrics: tuple[str, ...] | None = None
    ends_run_on_abort: bool = False

    @abstractmethod
    def begin(
        self, round_number: int, arrays: ArrayRecord, clients: Sequence[int], grid: Grid
    ) -> ConfigRecord | None:
        """Begin a round; return extra fields for its train requests, or None for no extra fields.

        Args:
            round_number: the round, from 1.
            arrays: the global model that clients start from.
            clients: the clients to ask, ascending.
            grid: Flower's grid, over which helpers of secure aggregation are asked.

        Raises:
            RoundAbortedError: no aggregate is possible, so no client is asked.
        """

    def scale(self, clip_norm: float | None) -> None:
        """Set the adaptive clip norm S of the updates of the next round.

        Args:
            clip_norm: the clip norm S, an L2 norm; None if the clip norm is fixed.
        """

    def weigh(self, client: int, factor: float) -> None:
        """Multiply a client's planned weight by a factor, in this round only; call it before `add`.

        Args:
            client: the client's number.
            factor: the multiplier, >= 0.

        Raises:
            ValueError: the factor is not 1, but the clients multiply updates by weights
                themselves, as in a secure sum.
        """
        if factor != 1.0:
            raise ValueError(f"client {client} weighs its own update, got a factor of {factor:g}")

    @abstractmethod
    def add(self, client: int, answer: A) -> None:
        """Add a client's update to the aggregate.

        Raises:
            InvalidUpdateError: the update is not accepted, and the client is skipped.
        """

    def skip(self, client: int) -> None:
        """Leave a client of the round out of the aggregate; the base class waits for no client."""

    @abstractmethod
    def finish(self) -> AggregationResult:
        """Return the aggregate of the round, with the added clients that are missing from it.

        Raises:
            RoundAbortedError: the updates cannot be aggregated.
        """

    def give_up(self) -> AggregationResult:
        """Return what is released in a round that was given up; here nothing is."""
        return AggregationResult(None)


class PlainAggregator(Aggregator[TrainReply]):
    """Aggregator that sees every single update and computes the weighted mean.

    Guarantee: a client has its planned weight, whatever the client reports.

    Args:
        weights: the aggregation weights of all clients.
        keeps_models: whether the result of a round also holds every client's model.
    """

    reply_type = TrainReply

    def __init__(self, weights: ClientWeights, *, keeps_models: bool = False) -> None:
        self.name = f"{weights.name} weights"
        self._weights = weights
        self._keeps_models = keeps_models
        self._mean: OrderedMean | None = None
        self._models: dict[int, Mapping[str, np.ndarray]] = {}
        self._factors: dict[int, float] = {}

    def begin(
        self, round_number: int, arrays: ArrayRecord, clients: Sequence[int], grid: Grid
    ) -> ConfigRecord | None:
        """Begin a round; train requests get no extra fields, so the result is None."""
        self._mean, self._models = OrderedMean(clients, to_numpy(upload_base(arrays))), {}
        self._factors = {}
        return None

    def weigh(self, client: int, factor: float) -> None:
        """Multiply the planned weight of a client by a factor >= 0, in this round only."""
        self._factors[client] = factor

    def add(self, client: int, answer: TrainReply) -> None:
        """Add a client's model with its planned weight, times the factor that `weigh` set.

        Raises:
            InvalidUpdateError: `OrderedMean.add` refuses the model, or the client's number of
                examples is not the one that its weight was planned for.
        """
        try:
            self._weights.check_examples(client, answer.examples)
        except WeightingError as error:
            self.skip(client)
            raise InvalidUpdateError(str(error)) from error
        weight = float(self._weights.values[client]) * self._factors.get(client, 1.0)
        self._current.add(client, answer.arrays, weight)
        if self._keeps_models:
            self._models[client] = answer.arrays

    def skip(self, client: int) -> None:
        """Leave a client out of the aggregate."""
        self._current.skip(client)

    def finish(self) -> AggregationResult:
        """Return the weighted mean as a result, without arrays if no weight was positive."""
        mean, self._mean = self._current.result(), None
        kept = [self._models[client] for client in sorted(self._models)]
        models = {name: np.stack([model[name] for model in kept]) for name in (kept or [{}])[0]}
        return AggregationResult(None if mean is None else to_arrays(mean), models=models)

    @property
    def _current(self) -> OrderedMean:
        if self._mean is None:
            raise RuntimeError("no round was begun")
        return self._mean
