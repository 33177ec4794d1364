"""Optional parts of a round: privacy charges, adaptive clip norms, averaging, early stopping.

A part is a `RoundPart`: an object whose hooks the server calls during each round.
`RoundSetup.parts` lists the parts of a federation. A new part needs no change of the round itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedsim.algorithms.state import ServerState
from fedsim.protocol.arrays import digest, to_numpy
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import FederationError, ProtocolError
from fedsim.protocol.messages import TrainReply
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, BoundRule, whole_bound
from fedsim.protocol.upload_tags import UploadTags
from fedsim.server.aggregation.aggregator import Aggregator, ClientAnswer
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.round_report import RoundReport
from fedsim.server.settings import EarlyStoppingSettings

Metrics = Mapping[str, float | list[float]]


@dataclass(frozen=True)
class Aggregate:
    """Summary of a round's aggregate: which clients are in it, and how many steps they took.

    Attributes:
        clients: the clients in the aggregate, ascending.
        steps: the number of charged steps of each of these clients.
        clip_count: the noisy count that updates the adaptive clip norm, in grid steps (a step is
            the value of the integer 1 in the sum); None if the clip norm is fixed.
        has_model: whether the round produced a new global model.
    """

    clients: Sequence[int]
    steps: Mapping[int, int] = field(default_factory=dict)
    clip_count: int | None = None
    has_model: bool = True


class RoundPart:
    """Base class of an optional part of a round; its hooks do nothing.

    A part may store values between `begin` and `complete` of one round. Values that last from round
    to round belong in the `ServerState`.
    """

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Prepare this part for a round, before any client is asked.

        Args:
            state: the server state before the round.
            aggregator: the object that aggregates the updates of the round.
        """

    def start(self, client: int) -> ArrayRecord | None:
        """Return the model that a client starts from, or None for the global model."""
        return None

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Process a client's answer and return it, possibly changed.

        The result goes to the next part and, after the last part, to the aggregator.

        Raises:
            ProtocolError: the answer is invalid; the client is left out of the round.
        """
        return answer

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state after the round, changed by this part.

        Args:
            state: the state with the new model and the new round number.
            aggregate: the clients in the new model and their numbers of steps.
        """
        return state

    def scored(self, state: ServerState, metrics: Metrics) -> ServerState:
        """Return `state`, changed by this part in view of the new model's test metrics."""
        return state

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Return the round's report with the values of this part added."""
        return report

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Return the reason to end the run after the round that led to `state`, or None."""
        return None


ChargeRound = Callable[[int, str], Sequence[ClientSpend]]
"""Function that charges all clients on disk for a round, and returns every client's spend.

The arguments are the number of the round and the digest of the global model.
"""


@dataclass(frozen=True)
class Charges(RoundPart):
    """Part of a round that records the clients' privacy spends, and charges clients if necessary.

    Attributes:
        ledgers: the latest ledger of each client; None if the server keeps no ledgers.
        charge_round: function that charges all clients before a round; it is used if participation
            is secret. None if clients charge themselves and report their spend in replies.
    """

    ledgers: ClientLedgers | None
    charge_round: ChargeRound | None = None

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Charge every client for the round; do nothing if clients charge themselves."""
        if self.charge_round is None:
            return
        for spend in self.charge_round(state.round_number + 1, digest(state.arrays)):
            if self.ledgers is not None:
                self.ledgers.record(spend)

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Record the privacy spend that a client's answer reports; return the answer unchanged.

        Raises:
            ProtocolError: the reply has no spend, or the spend of another client.
        """
        if self.charge_round is None and self.ledgers is not None:
            if answer.spend is None:
                raise ProtocolError("the reply carries no record of the client's spend")
            if answer.spend.client != client:
                raise ProtocolError(f"the reply carries the spend of client {answer.spend.client}")
            self.ledgers.record(answer.spend)
        return answer

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Return the report with the largest ε of any client added.

        Failed clients may have been charged, so their spends are first looked up on disk.
        """
        if self.ledgers is None:
            return report
        for failure in report.clients.failed:
            self.ledgers.look_up(failure.client)
        return replace(report, epsilon_max=self.ledgers.epsilon_max())


@dataclass(frozen=True)
class Withdrawals(RoundPart):
    """Part of a round that ends the run when clients have spent their privacy budgets.

    Attributes:
        num_clients: the number of clients of the federation.
        first_ends: whether the first withdrawal ends the run; otherwise the last client's does.
    """

    num_clients: int
    first_ends: bool = False

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Return the reason to end the run, if enough clients spent their budgets; else None."""
        if len(state.withdrawn) == self.num_clients:
            return "every client has spent its privacy budget"
        if state.withdrawn and self.first_ends:
            names = ", ".join(str(client) for client in sorted(state.withdrawn)[:10])
            return f"the privacy budget of client {names} is spent (on_exhausted: stop)"
        return None


class Tags(RoundPart):
    """Part of a round that records a short tag (a digest) of each upload that the server can read.

    Uploads outside the aggregate have a tag too. This part must precede parts that change answers.

    Args:
        tags: object that computes the tag of an upload.
    """

    def __init__(self, tags: UploadTags) -> None:
        self._tags, self._round_number = tags, 0
        self._of: dict[int, str] = {}

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Forget the upload tags of the previous round."""
        self._of, self._round_number = {}, state.round_number + 1

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Store the tag (a digest) of a client's upload, and return the answer unchanged."""
        if isinstance(answer, TrainReply):
            self._of[client] = self._tags.of(client, self._round_number, answer)
        return answer

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Return the report with the upload tags added, in ascending order of client numbers."""
        tags = dict(sorted(self._of.items()))
        return replace(report, clients=replace(report.clients, uploads=tags))


class OwnBounds(RoundPart):
    """Part of a round that stores each client's own adaptive clip norm in the server state.

    A client outside the aggregate keeps its previous clip norm.
    """

    def __init__(self) -> None:
        self._adapted: dict[int, AdaptiveClipNorm] = {}

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Forget the clip norms of the previous round."""
        self._adapted = {}

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Store the adaptive clip norm that a client's answer reports, and return the answer."""
        if answer.clip_norm is not None:
            self._adapted[client] = answer.clip_norm
        return answer

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state with the new clip norms of the clients in the aggregate."""
        new = {k: self._adapted[k] for k in aggregate.clients if k in self._adapted}
        return replace(state, clip_norms=dict(sorted({**state.clip_norms, **new}.items())))


class SharedBound(RoundPart):
    """Part of a round that adapts one clip norm S for the whole updates of all clients.

    Each client sends a noisy bit, which says whether its update's norm is at most S.

    Guarantee: a round's S depends only on noisy values of earlier rounds, which were charged.

    Source: Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping"
    (arXiv:1905.03871), Algorithm 1.

    Args:
        first: S of the first round.
        rule: the rule that computes the next S from the share of updates whose norm is at most S.
        num_clients: the number of clients of the federation.
        unit: the value of the integer 1 in the sum of bits, if they are part of a noisy integer
            sum; None if each reply carries its own bit.
        divisor: a public number that divides the sum of bits; None for the number of participants.
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
        """Pass the round's clip norm S to the aggregator."""
        self._bits = {}
        aggregator.scale(self.of(state.clip_norms))

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Store the noisy clipping bit of a client's answer, unless bits are in a noisy sum.

        The answer is returned unchanged.

        Raises:
            ProtocolError: the reply lacks its bit.
        """
        if self._unit is None:
            if not isinstance(answer, TrainReply) or answer.clip_count is None:
                raise ProtocolError("the reply lacks the noisy bit of the adaptive clip norm")
            self._bits[client] = answer.clip_count
        return answer

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state with the clip norm of the next round."""
        bound, share = self.of(state.clip_norms), self._share_within(aggregate)
        after = bound if share is None else self._rule.next_bound(bound, share)
        return replace(state, clip_norms=dict.fromkeys(range(self._num_clients), after))

    def of(self, clip_norms: Mapping[int, AdaptiveClipNorm]) -> float:
        """Return the clip norm S of the next round, from the server state's clip norms."""
        return whole_bound(clip_norms.get(0, self._first))

    def _share_within(self, aggregate: Aggregate) -> float | None:
        """Return the noisy share of updates whose norm is at most S; None if there is no update.

        The clients' bits b, or their sum, are the noisy values of b − ½.
        """
        number = len(aggregate.clients) if self._divisor is None else self._divisor
        if self._unit is None:
            total = math.fsum(self._bits[client] for client in aggregate.clients)
        elif aggregate.clip_count is not None:
            total = aggregate.clip_count * self._unit
        else:
            return None
        return total / number + 0.5 if number else None


ExpectedNoise = Callable[[Mapping[int, int], Mapping[int, AdaptiveClipNorm], int], float | None]
"""(steps of each participant, clip norms by client, round) -> expected L2 norm of the noise.

A function of public plan values alone; None where the norm is not known.
"""


class NoiseLength(RoundPart):
    """Part of a round that reports the expected L2 norm of the noise in the aggregate.

    Args:
        expected: function of each client's steps, the clip norms and the round; it returns the
            expected norm.
    """

    def __init__(self, expected: ExpectedNoise) -> None:
        self._expected = expected
        self._bounds: Mapping[int, AdaptiveClipNorm] = {}

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Store the clip norms at the start of the round, which determine the noise norm."""
        self._bounds = state.clip_norms

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Return the report with the expected noise norm added, if the round has an aggregate."""
        if not aggregate.has_model:
            return report
        length = self._expected(aggregate.steps, self._bounds, report.round_number)
        return replace(report, model=replace(report.model, noise_norm=length))


@dataclass(frozen=True)
class IterateAverage(RoundPart):
    """Part of a round that keeps an exponential moving average of the global models.

    The average is the model that the federation evaluates and delivers. Clients continue from the
    last global model. The average is post-processing, so no ε changes.

    Attributes:
        decay: the decay factor `federation.ema_decay`, in (0, 1).
    """

    decay: float

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state with the moving average updated by the new global model.

        The weight of the model of round i is decay^(t − i) in round t, divided by the sum of all
        weights. The initial model has weight 0.
        """
        share = (1 - self.decay) / (1 - self.decay**state.round_number)
        average = dict[str, np.ndarray]()
        for name, value in to_numpy(state.arrays).items():
            if np.issubdtype(value.dtype, np.floating):  # integer counters are not averaged
                before = state.average.get(name, np.zeros(()))
                average[name] = before + share * (value - before)
        return replace(state, average=average)


@dataclass(frozen=True)
class EarlyStopping(RoundPart):
    """Part of a round that ends the run when a metric on the public test set no longer improves.

    Attributes:
        settings: the settings of `federation.early_stopping`.
    """

    settings: EarlyStoppingSettings

    def scored(self, state: ServerState, metrics: Metrics) -> ServerState:
        """Return `state` with its record of the best metric value updated by the new test metrics.

        Raises:
            FederationError: the test metrics lack this metric, or the metric is a list with a
                value per class.
        """
        value = metrics.get(f"test_{self.settings.metric}")
        if not isinstance(value, float):
            known = [
                name.removeprefix("test_")
                for name, number in metrics.items()
                if isinstance(number, float)
            ]
            raise FederationError(
                f"federation.early_stopping.metric: {self.settings.metric} is not a metric of the "
                f"test set that is one number; choose from {', '.join(known)}, or add it to "
                "evaluation.metrics"
            )
        return replace(state, best=self.settings.next_best(state.best, value, state.round_number))

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Return the reason to end the run, or None to continue."""
        return self.settings.reason_to_stop(state.best, state.round_number)
