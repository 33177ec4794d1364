"""What a round did: participants, cost, model and privacy, and the time of its parts."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypedDict

from fedsim.core.text_formats import finite_or_none
from fedsim.protocol.messages import Withdrawal
from fedsim.protocol.noisy_sums import LearntBound, whole_bound
from fedsim.protocol.traffic import Traffic
from fedsim.server.evaluation import EvaluationResult

PARTS = {
    "sample": "choose the participants and make the requests",
    "train": "wait for clients, which charge their accounts and train",
    "aggregate": "check the replies and aggregate them",
    "evaluate": "the new global model on the test set, and on held-out examples",
    "account": "ε of every client",
}


class Timeline:
    """Divides wall-clock time into parts, one after the other; a part may come again.

    Guarantee: the seconds of all parts sum to the time from the first `begin` to the last one.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None
        self._since = 0.0

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by part."""
        return dict(self._seconds)

    def begin(self, part: str | None) -> None:
        """End the current part and begin another; None: none.

        Raises:
            KeyError: there is no such part.
        """
        now = self._clock()
        if self._part is not None:
            self._seconds[self._part] += now - self._since
        if part is not None and part not in self._seconds:
            raise KeyError(part)
        self._part, self._since = part, now


class ClientReason(TypedDict):
    """A client that failed or withdrew, and why."""

    client: int
    reason: str


class ClientSteps(TypedDict):
    """A client that took fewer steps than planned."""

    client: int
    steps: int


class Spread(TypedDict):
    """Smallest, median and largest value."""

    min: float
    median: float
    max: float


class SecureRoundRow(TypedDict):
    """Secure aggregation in one round."""

    survivors: int
    aborted: str | None
    retried: int
    clipped: int
    clipped_metrics: int


class EvaluatedRow(TypedDict):
    """Evaluation on clients' held-out examples in one round."""

    clients: list[int]
    examples: int
    failed: list[ClientReason]


class TrafficRow(TypedDict):
    """Bytes from and to the clients in one round."""

    down: int
    up: int


class _RowOfAllRounds(TypedDict):
    round: int
    participants: list[int]
    failed: list[ClientReason]
    withdrawn: list[ClientReason]
    shortened: list[ClientSteps]
    seconds: float
    timeline: dict[str, float]
    epsilon_max: float | None
    clip_norm: Spread | None


class RoundRow(_RowOfAllRounds, total=False):
    """One line of `rounds.jsonl`; docs/reference/outputs.md explains each key.

    Beside these keys it has the metrics of the global model (`test_loss`, `test_accuracy`, ...),
    the clients' declared metrics, and `clients_...` where clients evaluate.
    """

    traffic: TrafficRow | None
    update_norm: float | None
    noise_norm: float | None
    unmoved: list[str]
    partial: list[ClientSteps]
    simulated_time: float
    staleness: Spread | None
    secure_aggregation: SecureRoundRow
    evaluated: EvaluatedRow | None


@dataclass(frozen=True)
class Failure:
    """A client whose update did not become part of the round, and why.

    `ends_run`: the client would reuse noise, or could not be charged; no further round is run.
    """

    client: int
    reason: str
    ends_run: bool = False


@dataclass(frozen=True)
class SecureRoundReport:
    """Secure aggregation in one round.

    Attributes:
        retried: questions that were asked again.
        clipped: values of updates that were clipped before the sum.
        clipped_metrics: clients that clipped a declared metric.
        metrics: means of the declared metrics over the clients in the sum; None where there is no
            sum.
    """

    retried: int = 0
    clipped: int = 0
    clipped_metrics: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundClients:
    """What became of the clients of a round.

    Attributes:
        participants: clients in the aggregate, ascending.
        failed: clients that dropped out of the round, ascending, and why.
        withdrawn: clients that left the federation in this round.
        shortened: steps of each client that took fewer than planned.
        partial: local steps of each participant that did a part of its work, by the schedule.
        staleness: rounds between the start of each participant and this one, where it is
            asynchronous.
        uploads: tag of the released values of each client that sent them in clear.
    """

    participants: tuple[int, ...] = ()
    failed: tuple[Failure, ...] = ()
    withdrawn: tuple[Withdrawal, ...] = ()
    shortened: Mapping[int, int] = field(default_factory=dict)
    partial: Mapping[int, int] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    uploads: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundCost:
    """Time and bytes of a round.

    Attributes:
        seconds: wall-clock time.
        timeline: `seconds` divided by `timeline.PARTS`.
        traffic: bytes from and to the clients; None where they would show who took part.
        simulated_time: time on the simulated clock of an asynchronous round; None elsewhere.
    """

    seconds: float = 0.0
    timeline: Mapping[str, float] = field(default_factory=dict)
    traffic: Traffic | None = None
    simulated_time: float | None = None


@dataclass(frozen=True)
class RoundModel:
    """The global model after a round, and how it moved.

    Attributes:
        digest: of the model.
        update_norm: L2 norm of the aggregate update; None without one.
        noise_norm: expected L2 norm of the noise in it; None without noise, or where it is not
            known.
        unmoved: trained tensors that round 1 left as they were.
    """

    digest: str = ""
    update_norm: float | None = None
    noise_norm: float | None = None
    unmoved: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundReport:
    """One finished round.

    Attributes:
        round_number: the round, from 1.
        metrics: metrics of the new global model on the server's test set; a list has one number
            for each class.
        clients: what became of them.
        cost: time and bytes.
        model: the new global model.
        epsilon_max: largest cumulative ε of any client; None without privacy.
        clip_norms: adapted clipping bound of each client with adaptive clipping.
        aborted: why the round was given up, which leaves the model as it was; None otherwise.
        secure: secure aggregation; None for plain aggregation.
        evaluation: what clients' held-out examples say; None in rounds without an evaluation, and
            "off" where the experiment has none.
    """

    round_number: int
    metrics: Mapping[str, float | list[float]]
    clients: RoundClients = field(default_factory=RoundClients)
    cost: RoundCost = field(default_factory=RoundCost)
    model: RoundModel = field(default_factory=RoundModel)
    epsilon_max: float | None = None
    clip_norms: Mapping[int, LearntBound] = field(default_factory=dict)
    aborted: str | None = None
    secure: SecureRoundReport | None = None
    evaluation: EvaluationResult | Literal["off"] | None = "off"

    def without_participants(self) -> Self:
        """Return the report for everybody but the server, where participation is secret.

        It names no client, and has no times and bytes: they grow with their number. A learnt
        bound stays: it is one for all clients, and a function of charged releases.
        """
        return replace(self, clients=RoundClients(), cost=RoundCost())

    def to_json(self) -> RoundRow:
        """Return the round's line of `rounds.jsonl`; infinite and NaN values are None."""
        clients, cost, model, epsilon = self.clients, self.cost, self.model, self.epsilon_max
        metrics = {name: _as_json(value) for name, value in self.metrics.items()}
        row = RoundRow(
            round=self.round_number,
            **metrics,
            participants=list(clients.participants),
            failed=[ClientReason(client=one.client, reason=one.reason) for one in clients.failed],
            withdrawn=[
                ClientReason(client=one.client, reason=one.reason) for one in clients.withdrawn
            ],
            shortened=[
                ClientSteps(client=client, steps=steps)
                for client, steps in clients.shortened.items()
            ],
            seconds=round(cost.seconds, 4),
            timeline={part: round(seconds, 4) for part, seconds in cost.timeline.items()},
            epsilon_max=None if epsilon is None else finite_or_none(epsilon),
            clip_norm=_spread(map(whole_bound, self.clip_norms.values())),
            traffic=None
            if cost.traffic is None
            else TrafficRow(down=cost.traffic.down, up=cost.traffic.up),
            update_norm=None if model.update_norm is None else finite_or_none(model.update_norm),
            noise_norm=model.noise_norm,
        )
        some: Any = {"unmoved": list(model.unmoved)} if model.unmoved else {}
        if clients.partial:
            some["partial"] = [ClientSteps(client=k, steps=n) for k, n in clients.partial.items()]
        if cost.simulated_time is not None:
            some["simulated_time"] = round(cost.simulated_time, 6)
            some["staleness"] = _spread(clients.staleness.values())
        return RoundRow(**row, **some, **self._secure_keys(), **self._evaluation_keys())

    def _secure_keys(self) -> dict[str, Any]:
        if self.secure is None:
            return {}
        return {
            **self.secure.metrics,
            "secure_aggregation": SecureRoundRow(
                survivors=len(self.clients.participants),
                aborted=self.aborted,
                retried=self.secure.retried,
                clipped=self.secure.clipped,
                clipped_metrics=self.secure.clipped_metrics,
            ),
        }

    def _evaluation_keys(self) -> dict[str, Any]:
        found = self.evaluation
        if found == "off":
            return {}
        if found is None:
            return {"evaluated": None}
        return {
            **{f"clients_{name}": finite_or_none(value) for name, value in found.metrics.items()},
            "evaluated": EvaluatedRow(
                clients=list(found.clients),
                examples=found.examples,
                failed=[
                    ClientReason(client=client, reason=reason)
                    for client, reason in found.failed.items()
                ],
            ),
        }


def withdrawal_rounds(rows: Iterable[RoundRow]) -> dict[int, int]:
    """Return the round in which each withdrawn client left, from lines of `rounds.jsonl`."""
    return {one["client"]: row["round"] for row in rows for one in row["withdrawn"]}


def numbers_of(row: Mapping[str, Any], prefixes: tuple[str, ...]) -> dict[str, float | None]:
    """Return the metrics of a row that are one number; lists have one for each class.

    Args:
        row: a line of `rounds.jsonl`, or `summary.json`.
        prefixes: beginnings of their names, such as `test_`.
    """
    return {
        name: value
        for name, value in row.items()
        if name.startswith(prefixes) and not isinstance(value, list)
    }


def _as_json(value: float | list[float]) -> Any:
    """Return a metric with null for every number that is not finite."""
    if isinstance(value, list):
        return [finite_or_none(each) for each in value]
    return finite_or_none(value)


def _spread(values: Iterable[float]) -> Spread | None:
    """Return the smallest, the median and the largest value; None for no values."""
    found = sorted(values)
    if not found:
        return None
    return Spread(min=found[0], median=statistics.median(found), max=found[-1])
