"""Report of a round: participants, cost, model, privacy, and the time of each phase."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypedDict

from fedsim.core.text_formats import finite_or_none
from fedsim.protocol.messages import Withdrawal
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, whole_bound
from fedsim.protocol.traffic import Traffic
from fedsim.server.evaluation import EvaluationResult

PARTS = {
    "sample": "choose the participants and make the requests",
    "train": "wait for clients, which charge their accounts and train",
    "aggregate": "check the replies and aggregate them",
    "evaluate": "the new global model on the test set, and on held-out examples",
    "account": "ε of every client",
}


class ClientReason(TypedDict):
    """A client that failed or withdrew, with the reason; an entry in a line of `rounds.jsonl`."""

    client: int
    reason: str


class ClientSteps(TypedDict):
    """A client and its number of local steps; an entry in a line of `rounds.jsonl`."""

    client: int
    steps: int


class Spread(TypedDict):
    """Summary of several values by the smallest, the median and the largest of them."""

    min: float
    median: float
    max: float


class SecureRoundRow(TypedDict):
    """Keys about secure aggregation in one line of `rounds.jsonl`."""

    survivors: int
    aborted: str | None
    retried: int
    clipped: int
    clipped_metrics: int


class EvaluatedRow(TypedDict):
    """Keys about evaluation on clients' held-out examples, in one line of `rounds.jsonl`."""

    clients: list[int]
    examples: int
    failed: list[ClientReason]


class TrafficRow(TypedDict):
    """Bytes sent to the clients (`down`) and by the clients (`up`) in one round."""

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

    The line also has the metrics of the global model (`test_loss`, `test_accuracy`, ...) and the
    clients' declared metrics. If clients evaluate, it has their metrics as `clients_...`.
    """

    traffic: TrafficRow | None
    update_norm: float | None
    noise_norm: float | None
    aborted: str
    unmoved: list[str]
    partial: list[ClientSteps]
    simulated_time: float
    staleness: Spread | None
    secure_aggregation: SecureRoundRow
    evaluated: EvaluatedRow | None


@dataclass(frozen=True)
class Failure:
    """A client whose update is not in the round's aggregate, and the reason.

    Attributes:
        client: the client's number.
        reason: why the update is not in the aggregate.
        ends_run: whether the failure ends the run: the client would reuse noise, or was not
            charged.
    """

    client: int
    reason: str
    ends_run: bool = False


@dataclass(frozen=True)
class SecureRoundReport:
    """Report on secure aggregation in one round.

    Attributes:
        retried: the number of queries that were sent again.
        clipped: the number of update values that were clipped before the sum.
        clipped_metrics: the number of clients that clipped a declared metric.
        metrics: the mean of each declared metric over the clients in the sum; None without a sum.
    """

    retried: int = 0
    clipped: int = 0
    clipped_metrics: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundClients:
    """Outcome of a round for each of its clients.

    Attributes:
        participants: the clients in the aggregate, ascending.
        failed: the clients that dropped out of the round, ascending, with the reasons.
        withdrawn: the clients that left the federation in this round.
        shortened: the number of steps, for each client that took fewer steps than planned.
        partial: the number of local steps, for each participant that did only a part of its work by
            the public schedule (a straggler).
        staleness: for each participant of an asynchronous round, the number of rounds that were
            applied while it trained.
        uploads: a short tag (a digest) of each upload that the server can read, by client.
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
    """Time and traffic of a round.

    Attributes:
        seconds: the wall-clock time of the round, in seconds.
        timeline: the seconds of each phase of the round, by the names in `PARTS`.
        traffic: the bytes from and to the clients; None if they would reveal who took part.
        simulated_time: the simulated time after an asynchronous round; None for a synchronous one.
    """

    seconds: float = 0.0
    timeline: Mapping[str, float] = field(default_factory=dict)
    traffic: Traffic | None = None
    simulated_time: float | None = None


@dataclass(frozen=True)
class RoundModel:
    """Digest of the global model after a round, and the size of its update.

    Attributes:
        digest: the digest of the global model.
        update_norm: the L2 norm of the aggregate update; None without an update.
        noise_norm: the expected L2 norm of the noise in the update; None without noise or if
            unknown.
        unmoved: the names of trainable tensors that round 1 did not change.
    """

    digest: str = ""
    update_norm: float | None = None
    noise_norm: float | None = None
    unmoved: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundReport:
    """Report of one finished round.

    Attributes:
        round_number: the round, from 1.
        metrics: the metrics of the new global model on the server's test set. A metric that is a
            list has one number per class.
        clients: the outcome of the round for its clients.
        cost: the time and the traffic of the round.
        model: the digest and the update of the new global model.
        epsilon_max: the largest cumulative ε of any client; None without privacy.
        clip_norms: the adaptive clip norm of each client that has one.
        aborted: the reason if the round was aborted, which leaves the model unchanged, but for
            correlated noise of the server; else None.
        secure: the report of secure aggregation; None for plain aggregation.
        evaluation: the metrics on clients' held-out examples. The value is None in a round without
            evaluation, and "off" if the experiment has no federated evaluation.
    """

    round_number: int
    metrics: Mapping[str, float | list[float]]
    clients: RoundClients = field(default_factory=RoundClients)
    cost: RoundCost = field(default_factory=RoundCost)
    model: RoundModel = field(default_factory=RoundModel)
    epsilon_max: float | None = None
    clip_norms: Mapping[int, AdaptiveClipNorm] = field(default_factory=dict)
    aborted: str | None = None
    secure: SecureRoundReport | None = None
    evaluation: EvaluationResult | Literal["off"] | None = "off"

    def without_participants(self) -> Self:
        """Return the report without anything that reveals the participants of a secret draw.

        The result names no client. Times and bytes are left out, because they grow with the number
        of participants. The adaptive clip norm stays: it is equal for all clients and depends only
        on charged releases.
        """
        return replace(self, clients=RoundClients(), cost=RoundCost())

    def to_json(self) -> RoundRow:
        """Return the report as a line of `rounds.jsonl`; infinite and NaN values become None."""
        clients, cost, model, epsilon = self.clients, self.cost, self.model, self.epsilon_max
        metrics = {name: _as_json(value) for name, value in self.metrics.items()}
        row = RoundRow(
            round=self.round_number,
            **metrics,
            participants=list(clients.participants),
            failed=_reasons((failure.client, failure.reason) for failure in clients.failed),
            withdrawn=_reasons((left.client, left.reason) for left in clients.withdrawn),
            shortened=_steps(clients.shortened),
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
        if self.aborted is not None and self.secure is None:
            some["aborted"] = self.aborted
        if clients.partial:
            some["partial"] = _steps(clients.partial)
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
        evaluation = self.evaluation
        if evaluation == "off":
            return {}
        if evaluation is None:
            return {"evaluated": None}
        return {
            **{
                f"clients_{name}": finite_or_none(value)
                for name, value in evaluation.metrics.items()
            },
            "evaluated": EvaluatedRow(
                clients=list(evaluation.clients),
                examples=evaluation.examples,
                failed=_reasons(evaluation.failed.items()),
            ),
        }


def withdrawal_rounds(rows: Iterable[RoundRow]) -> dict[int, int]:
    """Return the round of each client's withdrawal, by client number, from `rounds.jsonl` lines."""
    return {client["client"]: row["round"] for row in rows for client in row["withdrawn"]}


def numbers_of(row: Mapping[str, Any], prefixes: tuple[str, ...]) -> dict[str, float | None]:
    """Return the metrics of a row that are single numbers, without lists and other values.

    Args:
        row: a line of `rounds.jsonl`, or the content of `summary.json`.
        prefixes: the prefixes of the metric names to return, such as `test_`.
    """
    return {
        name: value
        for name, value in row.items()
        if name.startswith(prefixes) and (value is None or isinstance(value, int | float))
    }


def _as_json(value: float | list[float]) -> Any:
    """Return a metric, with None in place of every number that is not finite."""
    if isinstance(value, list):
        return [finite_or_none(number) for number in value]
    return finite_or_none(value)


def _reasons(pairs: Iterable[tuple[int, str]]) -> list[ClientReason]:
    return [ClientReason(client=client, reason=reason) for client, reason in pairs]


def _steps(steps: Mapping[int, int]) -> list[ClientSteps]:
    return [ClientSteps(client=client, steps=number) for client, number in steps.items()]


def _spread(values: Iterable[float]) -> Spread | None:
    """Return the smallest, the median and the largest value, or None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(min=ordered[0], median=statistics.median(ordered), max=ordered[-1])
