"""Requests of the server and replies of the clients, as Flower messages.

The layout follows Flower's own strategies: requests have the records `arrays` and `config`, replies
have `arrays` and `metrics`. So a fedsim client also works under these strategies. A client's
privacy spend is in a separate record, never among the metrics: strategies average metrics, and an
averaged ε means nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from fedsim.protocol.arrays import is_live, live_record, read_arrays, record_of, to_arrays
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.noisy_sums import AdaptiveClipNorm

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
PRIVACY = "privacy"
WITHDRAWAL = "withdrawal"
TIMING = "timing"
ADAPTATION = "learnt"
OFFER = "secagg-offer"
SECAGG = "secagg"
SECAGG_ARRAYS = "secagg-arrays"
STAGES = SHARES, MASKED, UNMASK = "secagg_shares", "secagg_masked", "secagg_unmask"

ROUND = "server-round"
NUM_EXAMPLES = "num-examples"
DELAY = "simulated-delay"
CLIP_NORM = "clip-norm"
CLIP_COUNT = "clip-count"
WEIGHT = "weight"
SENT = "sent/"  # prefix of the names of the algorithm's arrays


@dataclass(frozen=True)
class TrainRequest:
    """The server's request to a client to train in a round.

    Attributes:
        round_number: the round, from 1.
        arrays: the global model.
        offer: the parameters of a secure sum; None if updates are sent in clear.
        clip_norm: the adaptive clip norm after earlier rounds, or a tuple of them if groups of
            parameters are clipped separately; None if the clip norm is fixed.
        weight: the client's planned weight in the mean, which the client checks; None if all
            clients have the same weight.
        sent: further arrays by name that the algorithm sends for each trained parameter, computed
            from earlier uploads alone.
    """

    round_number: int
    arrays: ArrayRecord
    offer: ConfigRecord | None = None
    clip_norm: AdaptiveClipNorm | None = None
    weight: int | None = None
    sent: Mapping[str, ArrayRecord] = field(default_factory=dict)

    def to_message(self, node_id: int) -> Message:
        """Return the request as a Flower message to one node."""
        config = ConfigRecord({ROUND: self.round_number})
        if self.clip_norm is not None:
            config[CLIP_NORM] = _bound_field(self.clip_norm)
        if self.weight is not None:
            config[WEIGHT] = self.weight
        content = RecordDict({ARRAYS: self.arrays, CONFIG: config})
        if self.offer is not None:
            content[OFFER] = self.offer
        for name, arrays in self.sent.items():
            content[f"{SENT}{name}"] = arrays
        return Message(content, node_id, MessageType.TRAIN)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Return the train request that a Flower message holds.

        Raises:
            ProtocolError: the request has no arrays, its round is not a whole number ≥ 1, its clip
                norm is not > 0, or its weight is not a whole number ≥ 0.
        """
        arrays = record_of(message.content, ARRAYS, ArrayRecord)
        config = record_of(message.content, CONFIG, ConfigRecord)
        if arrays is None or config is None:
            raise ProtocolError(f"a request needs the records {ARRAYS!r} and {CONFIG!r}")
        round_number = config.get(ROUND)
        if not isinstance(round_number, int) or round_number < 1:
            raise ProtocolError(f"{CONFIG}.{ROUND} must be a whole number >= 1, got {round_number}")
        offer = record_of(message.content, OFFER, ConfigRecord)
        weight = config.get(WEIGHT)
        if weight is not None and (not isinstance(weight, int) or weight < 0):
            raise ProtocolError(f"{CONFIG}.{WEIGHT} must be a whole number >= 0, got {weight!r}")
        sent = {
            name.removeprefix(SENT): record
            for name, record in message.content.array_records.items()
            if name.startswith(SENT)
        }
        return cls(round_number, arrays, offer, _clip_norm(config), weight, sent)


@dataclass(frozen=True)
class TrainReply:
    """A client's reply to a train request.

    Attributes:
        arrays: the client's model after training, arrays by name.
        examples: the client's public number of examples.
        spend: the client's spent privacy budget; None without privacy.
        delay: the delay of the reply, in simulated seconds.
        clip_norm: the adaptive clip norm after the round, which the round's privacy charge covers;
            None without adaptive clipping.
        clip_count: the noisy value of b − ½, where b is 1 if the update's norm was within the clip
            norm, and 0 otherwise. The server adapts the clip norm with this value. None if the
            server adapts no clip norm.
        numbers: the training metrics that the algorithm declares, by name; empty with privacy.
    """

    arrays: Mapping[str, np.ndarray]
    examples: int
    spend: ClientSpend | None
    delay: float = 0.0
    clip_norm: AdaptiveClipNorm | None = None
    clip_count: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_message(self, request: Message) -> Message:
        """Return the reply as a Flower message that answers `request`.

        If the request has its arrays as objects in memory and not as bytes, so has the reply.
        """
        asked = record_of(request.content, ARRAYS, ArrayRecord)
        pack = live_record if asked is not None and is_live(asked) else to_arrays
        content = RecordDict(
            {
                ARRAYS: pack(self.arrays),
                METRICS: MetricRecord({NUM_EXAMPLES: self.examples, **self.numbers}),
                **side_records(self.spend, self.delay),
            }
        )
        learnt = {CLIP_NORM: self.clip_norm, CLIP_COUNT: self.clip_count}
        known = ConfigRecord(
            {name: _bound_field(value) for name, value in learnt.items() if value is not None}
        )
        if known:
            content[ADAPTATION] = known
        return Message(content, reply_to=request)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Return the train reply that a Flower message holds.

        Raises:
            ProtocolError: a record is missing or malformed.
        """
        record = record_of(message.content, ARRAYS, ArrayRecord)
        metrics = record_of(message.content, METRICS, MetricRecord)
        if record is None or metrics is None:
            raise ProtocolError(f"a train reply needs the records {ARRAYS!r} and {METRICS!r}")
        try:
            arrays = read_arrays(record)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        examples = _examples_of(metrics)
        adapted = record_of(message.content, ADAPTATION, ConfigRecord)
        clip_norm = None if adapted is None else _clip_norm(adapted)
        clip_count = None if adapted is None else adapted.get(CLIP_COUNT)
        if clip_count is not None and not (
            isinstance(clip_count, float) and math.isfinite(clip_count)
        ):
            raise ProtocolError(f"{CLIP_COUNT} must be a finite number, got {clip_count!r}")
        numbers = {
            name: value
            for name, value in metrics.items()
            if name != NUM_EXAMPLES and isinstance(value, float)
        }
        side = read_side_records(message)
        return cls(arrays, examples, *side, clip_norm, clip_count, numbers)


@dataclass(frozen=True)
class EvaluateRequest:
    """The server's request to evaluate a global model on the client's held-out examples.

    Attributes:
        round_number: the round, from 1.
        arrays: the global model after that round.
    """

    round_number: int
    arrays: ArrayRecord

    def to_message(self, node_id: int) -> Message:
        """Return the request as a Flower message to one node."""
        config = ConfigRecord({ROUND: self.round_number})
        content = RecordDict({ARRAYS: self.arrays, CONFIG: config})
        return Message(content, node_id, MessageType.EVALUATE)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Return the evaluate request that a Flower message holds.

        Raises:
            ProtocolError: the request has no arrays, or its round is not a whole number ≥ 1.
        """
        request = TrainRequest.from_message(message)
        return cls(request.round_number, request.arrays)


@dataclass(frozen=True)
class EvaluateReply:
    """A client's reply to an evaluate request.

    Attributes:
        examples: the number of the client's held-out examples.
        metrics: the mean of each metric over these examples, by name.
        delay: the delay of the reply, in simulated seconds.
    """

    examples: int
    metrics: Mapping[str, float]
    delay: float = 0.0

    def to_message(self, request: Message) -> Message:
        """Return the reply as a Flower message that answers `request`."""
        metrics = MetricRecord({NUM_EXAMPLES: self.examples, **self.metrics})
        content = RecordDict({METRICS: metrics, **side_records(None, self.delay)})
        return Message(content, reply_to=request)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Return the evaluate reply that a Flower message holds.

        Raises:
            ProtocolError: a record is missing or malformed.
        """
        record = record_of(message.content, METRICS, MetricRecord)
        if record is None:
            raise ProtocolError(f"an evaluate reply needs the record {METRICS!r}")
        metrics: dict[str, Any] = dict(record)
        examples = _examples_of(metrics)
        del metrics[NUM_EXAMPLES]
        if not all(isinstance(value, float) for value in metrics.values()):
            raise ProtocolError(f"{METRICS} must be numbers, got {metrics}")
        return cls(examples, metrics, read_side_records(message)[1])


def _examples_of(metrics: Mapping[str, Any]) -> int:
    examples = metrics.get(NUM_EXAMPLES)
    if not isinstance(examples, int) or examples < 0:
        raise ProtocolError(f"{METRICS}.{NUM_EXAMPLES} must be >= 0, got {examples}")
    return examples


def side_records(spend: ClientSpend | None, delay: float) -> dict[str, ConfigRecord]:
    """Return the Flower records for the privacy spend and the delay of a reply.

    Args:
        spend: the client's spent privacy budget; None without privacy.
        delay: the delay of the reply, in simulated seconds.
    """
    records: dict[str, ConfigRecord] = {}
    if spend is not None:
        records[PRIVACY] = spend.to_record()
    if delay:
        records[TIMING] = ConfigRecord({DELAY: delay})
    return records


def read_side_records(message: Message) -> tuple[ClientSpend | None, float]:
    """Return the pair (privacy spend of the client, delay in simulated seconds) from a reply.

    The spend is None without privacy.

    Raises:
        ProtocolError: a record is malformed.
    """
    record = record_of(message.content, PRIVACY, ConfigRecord)
    spend = None if record is None else ClientSpend.from_record(record)
    timing = record_of(message.content, TIMING, ConfigRecord)
    delay = 0.0 if timing is None else timing.get(DELAY)
    if not isinstance(delay, float) or not delay >= 0.0:
        raise ProtocolError(f"{TIMING}.{DELAY} must be a number of seconds, got {delay!r}")
    return spend, delay


@dataclass(frozen=True)
class Withdrawal:
    """A client's reply that it leaves, because its privacy budget allows no further step.

    Attributes:
        client: the client's number.
        reason: why the client leaves.
    """

    client: int
    reason: str

    def to_message(self, request: Message) -> Message:
        """Return the withdrawal as a Flower message that answers `request`."""
        fields = ConfigRecord({"client": self.client, "reason": self.reason})
        return Message(RecordDict({WITHDRAWAL: fields}), reply_to=request)

    @classmethod
    def from_message(cls, message: Message) -> Self | None:
        """Return the withdrawal that a Flower message holds; None if it is not a withdrawal.

        Raises:
            ProtocolError: a field is missing or malformed.
        """
        record = record_of(message.content, WITHDRAWAL, ConfigRecord)
        if record is None:
            return None
        client, reason = record.get("client"), record.get("reason")
        if not isinstance(client, int) or not isinstance(reason, str):
            raise ProtocolError(f"malformed withdrawal: client {client!r}, reason {reason!r}")
        return cls(client, reason)


def _clip_norm(record: ConfigRecord) -> AdaptiveClipNorm | None:
    value = record.get(CLIP_NORM)
    if value is None:
        return None
    parts = value if isinstance(value, list) else [value]
    bounds = tuple(bound for bound in parts if isinstance(bound, float) and 0.0 < bound < math.inf)
    if not parts or len(bounds) < len(parts):
        raise ProtocolError(f"{CLIP_NORM} must be a finite number > 0, got {value!r}")
    return bounds if isinstance(value, list) else bounds[0]


def _bound_field(bound: AdaptiveClipNorm) -> float | list[float]:
    """Return a clip norm as a field of a Flower record."""
    return list(bound) if isinstance(bound, tuple) else bound


@dataclass(frozen=True)
class SealedReply:
    """A client's reply to a train request under secure aggregation, with no update in clear.

    Attributes:
        content: the records of the secure aggregation protocol: a secret share with sealed seeds,
            or public keys.
        spend: the client's privacy spend, public under its adjacency; None without privacy.
        delay: the delay of the reply, in simulated seconds.
        clip_norm: always None, as a client cannot adapt a clip norm under secure aggregation.
    """

    content: RecordDict
    spend: ClientSpend | None
    delay: float = 0.0
    clip_norm: float | None = None

    def to_message(self, request: Message) -> Message:
        """Return the reply as a Flower message that answers `request`."""
        content = RecordDict({**self.content, **side_records(self.spend, self.delay)})
        return Message(content, reply_to=request)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Return the sealed reply that a Flower message holds.

        Raises:
            ProtocolError: the message has no record of secure aggregation, or has values in clear.
        """
        content = message.content
        if SECAGG not in content.config_records:
            raise ProtocolError(f"a train reply needs the record {SECAGG!r}; nothing was added")
        unsealed = [*content.metric_records, *(set(content.array_records) - {SECAGG_ARRAYS})]
        if unsealed:
            raise ProtocolError(
                f"the reply has {sorted(unsealed)} in clear, which secure aggregation hides; "
                "run the same experiment on every node"
            )
        return cls(content, *read_side_records(message))
