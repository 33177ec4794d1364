"""Parts of a round beside the mean of the updates: charges, bounds, averages, early stopping.

A part is one object with a few hooks (`RoundPart`); a federation's server has a tuple of them
(`RoundSetup.parts`). A new part needs no change of the round itself.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedsim.algorithms.state import ServerState
from fedsim.protocol.arrays import digest, to_numpy
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import FederationError, ProtocolError
from fedsim.protocol.messages import TrainReply
from fedsim.protocol.noisy_sums import BoundRule, LearntBound, whole_bound
from fedsim.protocol.upload_tags import UploadTags
from fedsim.server.aggregation.aggregator import Aggregator, ClientAnswer
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.round_report import RoundReport
from fedsim.server.settings import EarlyStoppingSettings

Metrics = Mapping[str, float | list[float]]


@dataclass(frozen=True)
class Aggregate:
    """What a round's aggregate was made of.

    Attributes:
        clients: in the aggregate, ascending.
        steps: charged steps that each of them took.
        clip_count: the noisy count of a learnt bound (see `AggregationResult`).
        has_model: whether there is an aggregate.
    """

    clients: Sequence[int]
    steps: Mapping[int, int] = field(default_factory=dict)
    clip_count: int | None = None
    has_model: bool = True


class RoundPart:
    """A part of every round; each hook does nothing here.

    A part may keep what it sees between `begin` and `complete`, and nothing from round to round:
    that is in the `ServerState`.
    """

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Prepare the round after a state, before any client is asked."""

    def start(self, client: int) -> ArrayRecord | None:
        """Return the model that a client starts from; None: the global one."""
        return None

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Read an answer, and return it as the next part and the aggregator see it.

        Raises:
            ProtocolError: the answer is wrong; its client is left out of the round.
        """
        return answer

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the state after the round.

        Args:
            state: with the new model and the new round number.
            aggregate: what it is made of.
        """
        return state

    def scored(self, state: ServerState, metrics: Metrics) -> ServerState:
        """Return the state after the round, once its model has metrics."""
        return state

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Return the round's report with what the part knows."""
        return report

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Return why no round follows a state; None: one does."""
        return None


ChargeRound = Callable[[int, str], Sequence[ClientSpend]]
"""(round, digest of its global model) -> the spend of every client, all charged on disk."""


@dataclass(frozen=True)
class Charges(RoundPart):
    """The clients' spend, as the server knows it.

    Attributes:
        ledgers: the latest ledger of each client; None: nobody asks for it.
        charge_round: charges all clients before a round, where participation is secret; None:
            clients charge themselves, and their replies say so.
    """

    ledgers: ClientLedgers | None
    charge_round: ChargeRound | None = None

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Charge every client for the round where clients do not charge themselves."""
        if self.charge_round is None:
            return
        for spend in self.charge_round(state.round_number + 1, digest(state.arrays)):
            if self.ledgers is not None:
                self.ledgers.record(spend)

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Record the spend in a reply.

        Raises:
            ProtocolError: it has none, or that of another client.
        """
        if self.charge_round is None and self.ledgers is not None:
            if answer.spend is None:
                raise ProtocolError("the reply carries no record of the client's spend")
            if answer.spend.client != client:
                raise ProtocolError(f"the record of spend is of client {answer.spend.client}")
            self.ledgers.record(answer.spend)
        return answer

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Add the largest ε of any client; a client that failed may have been charged."""
        if self.ledgers is None:
            return report
        for failure in report.clients.failed:
            self.ledgers.look_up(failure.client)
        return replace(report, epsilon_max=self.ledgers.epsilon_max())


@dataclass(frozen=True)
class Withdrawals(RoundPart):
    """The end of a run whose clients have spent their privacy budgets.

    Attributes:
        num_clients: all clients of the federation.
        first_ends: whether the first client that withdraws ends it.
    """

    num_clients: int
    first_ends: bool = False

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Return whose budgets are spent, where that ends the run."""
        if len(state.withdrawn) == self.num_clients:
            return "every client has spent its privacy budget"
        if state.withdrawn and self.first_ends:
            names = ", ".join(str(client) for client in sorted(state.withdrawn)[:10])
            return f"the privacy budget of client {names} is spent (on_exhausted: stop)"
        return None


class Tags(RoundPart):
    """The tag of each upload that came in clear, whether it is in the aggregate or not.

    It comes before parts that change answers.

    Args:
        tags: makes them.
    """

    def __init__(self, tags: UploadTags) -> None:
        self._tags, self._round_number = tags, 0
        self._of: dict[int, str] = {}

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Forget the tags of the round before."""
        self._of, self._round_number = {}, state.round_number + 1

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Tag an upload."""
        if isinstance(answer, TrainReply):
            self._of[client] = self._tags.of(client, self._round_number, answer)
        return answer

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Add the tags, ascending by client."""
        tags = dict(sorted(self._of.items()))
        return replace(report, clients=replace(report.clients, uploads=tags))


class OwnBounds(RoundPart):
    """Clipping bounds that each client adapts itself; one outside the aggregate keeps its own."""

    def __init__(self) -> None:
        self._adapted: dict[int, LearntBound] = {}

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Forget the bounds of the round before."""
        self._adapted = {}

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Read the bound of a reply."""
        if answer.clip_norm is not None:
            self._adapted[client] = answer.clip_norm
        return answer

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the state with the new bounds."""
        new = {k: self._adapted[k] for k in aggregate.clients if k in self._adapted}
        return replace(state, clip_norms=dict(sorted({**state.clip_norms, **new}.items())))


class SharedBound(RoundPart):
    """The bound S of whole updates, which the server learns from noisy bits: one for all clients.

    Guarantee: S of a round is a function of releases of earlier rounds, which were charged.

    Source: Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping"
    (arXiv:1905.03871), Algorithm 1.

    Args:
        first: S of the first round.
        rule: how S follows the share of updates within it.
        num_clients: all clients of the federation: each is told the same S.
        unit: length of a step of the grid of the bits, where they are a part of a noisy sum; None:
            replies carry them.
        divisor: a public number in place of the number of those who came; None: that number.
    """

    def __init__(
        self,
        first: float,
        rule: BoundRule,
        num_clients: int,
        unit: float | None = None,
        divisor: float | None = None,
    ) -> None:
        self._first, self._rule, self._num_clients = first, rule, num_clients
        self._unit, self._divisor = unit, divisor
        self._bits: dict[int, float] = {}

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Tell the aggregator the bound of the round."""
        self._bits = {}
        aggregator.scale(self.of(state.clip_norms))

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Read the noisy bit of a reply.

        Raises:
            ProtocolError: it has none.
        """
        if self._unit is None:
            if not isinstance(answer, TrainReply) or answer.clip_count is None:
                raise ProtocolError("the reply lacks the noisy bit that the bound is learnt from")
            self._bits[client] = answer.clip_count
        return answer

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the state with the bound of the next round."""
        bound = self.of(state.clip_norms)
        if self._unit is None:
            bits = [self._bits[client] for client in aggregate.clients]
            return replace(state, clip_norms=self.after_bits(bound, bits))
        learnt = self.after_sum(bound, aggregate.clip_count, len(aggregate.clients))
        return replace(state, clip_norms=learnt)

    def of(self, clip_norms: Mapping[int, LearntBound]) -> float:
        """Return S of the round after a state with these bounds."""
        return whole_bound(clip_norms.get(0, self._first))

    def after_sum(self, bound: float, count: int | None, participants: int) -> dict[int, float]:
        """Return the bound of every client after a noisy sum.

        Args:
            bound: S of the round.
            count: Σ (b − ½) with noise, in steps of its grid; None: no sum was opened.
            participants: number of clients in the sum.
        """
        number = participants if self._divisor is None else self._divisor
        if count is None or self._unit is None or not number:
            return self._for_all(bound)
        return self._for_all(self._rule.next_bound(bound, count * self._unit / number + 0.5))

    def after_bits(self, bound: float, bits: Iterable[float]) -> dict[int, float]:
        """Return the bound of every client after noisy bits.

        Args:
            bound: S of the round.
            bits: b − ½ with noise, of each client in the aggregate.
        """
        found = list(bits)
        if not found:
            return self._for_all(bound)
        return self._for_all(self._rule.next_bound(bound, math.fsum(found) / len(found) + 0.5))

    def _for_all(self, bound: float) -> dict[int, float]:
        return dict.fromkeys(range(self._num_clients), bound)


ExpectedNoise = Callable[[Mapping[int, int], Mapping[int, LearntBound], int], float | None]
"""(steps of each participant, adapted bounds, round) -> length of the noise in the aggregate.

By public plan values alone.
"""


class NoiseLength(RoundPart):
    """The expected length of the noise in a round's aggregate.

    Args:
        expected: computes it.
    """

    def __init__(self, expected: ExpectedNoise) -> None:
        self._expected = expected
        self._bounds: Mapping[int, LearntBound] = {}

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Keep the bounds of the round."""
        self._bounds = state.clip_norms

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Add the length, where there is an aggregate."""
        if not aggregate.has_model:
            return report
        length = self._expected(aggregate.steps, self._bounds, report.round_number)
        return replace(report, model=replace(report.model, noise_norm=length))


@dataclass(frozen=True)
class IterateAverage(RoundPart):
    """The model of a federation as an average of its global models, the older the less.

    Clients go on from the last global model. The average is post-processing, so no ε changes.

    Attributes:
        decay: in (0, 1) (`federation.server_averaging`).
    """

    decay: float

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the state with the average of the models of all rounds."""
        average = next_average(
            state.average, state.arrays, round_number=state.round_number, decay=self.decay
        )
        return replace(state, average=average)


def next_average(
    average: Mapping[str, np.ndarray], arrays: ArrayRecord, *, round_number: int, decay: float
) -> dict[str, np.ndarray]:
    """Return the average of the models of all rounds, each older one weighing `decay` as much.

    The model of round i of t has the weight decay^(t − i) over the sum of these. The initial model
    has none.

    Args:
        average: the average before the round, float64 by name; empty before the first round.
        arrays: the global model after the round.
        round_number: t, from 1.
        decay: in (0, 1).
    """
    share = (1 - decay) / (1 - decay**round_number)
    found = {}
    for name, value in to_numpy(arrays).items():
        if np.issubdtype(value.dtype, np.floating):  # counters are those of the last round
            before = average.get(name, np.zeros(()))
            found[name] = before + share * (value - before)
    return found


@dataclass(frozen=True)
class EarlyStopping(RoundPart):
    """The end of a run whose metric on the public test set improves no more.

    Attributes:
        settings: `federation.early_stopping`.
    """

    settings: EarlyStoppingSettings

    def scored(self, state: ServerState, metrics: Metrics) -> ServerState:
        """Return the state with the best value of the metric.

        Raises:
            FederationError: the test set has no such metric, or it has a number for each class.
        """
        value = metrics.get(f"test_{self.settings.metric}")
        if not isinstance(value, float):
            known = [
                name.removeprefix("test_")
                for name, number in metrics.items()
                if isinstance(number, float)
            ]
            raise FederationError(
                f"federation.early_stopping.metric: {self.settings.metric} is no number of the "
                f"test set; choose from {', '.join(known)}, or add it to evaluation.metrics"
            )
        return replace(state, best=self.settings.next_best(state.best, value, state.round_number))

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Return why the run ends; None: it goes on."""
        return self.settings.reason_to_stop(state.best, state.round_number)
