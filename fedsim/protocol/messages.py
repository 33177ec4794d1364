"""The messages of a federation: what the server asks, what a client answers.

The layout follows Flower's own strategies (`arrays` and `config` in, `arrays` and `metrics` out),
so a fedsim client also works under them. The privacy statement travels in a record of its own,
never among the metrics: strategies average metrics, and an averaged ε means nothing.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from fedsim.accountant import PrivacyLedger
from fedsim.core.errors import FedsimError
from fedsim.protocol.records import config_record, metric_record, record_dict

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
PRIVACY = "privacy"
WITHDRAWAL = "withdrawal"
TIMING = "timing"
LEARNT = "learnt"
IDENTITY = "identity"
OFFER = "secagg-offer"

ROUND = "server-round"
NUM_EXAMPLES = "num-examples"
PARTITION = "partition-id"
ROLE = "role"
DELAY = "simulated-delay"
CLIP_NORM = "clip-norm"

ROLL_CALL = "roll_call"
ROLL_CALL_TYPE = f"{MessageType.QUERY}.{ROLL_CALL}"


class ProtocolError(FedsimError, ValueError):
    """A message that does not follow the protocol; it names the record and what is wrong."""


@dataclass(frozen=True)
class PrivacyStatement:
    """What a client says of its own privacy account with every upload.

    Everything in it is public under the client's adjacency: the settings of its mechanism and the
    ledger, from which anyone can recompute ε. `head` is the hash of its last ledger record, and
    `round_steps` are the steps that it paid for.
    """

    client: int
    examples: int
    delta: float
    noise_multiplier: float
    sampling_rate: float
    target_epsilon: float | None
    rounds: int
    steps: int
    round_steps: int
    ledger: PrivacyLedger
    head: str

    def to_record(self) -> ConfigRecord:
        """Return the Flower record of this statement."""
        fields: dict[str, Any] = {
            "client": self.client,
            "examples": self.examples,
            "delta": self.delta,
            "noise-multiplier": self.noise_multiplier,
            "sampling-rate": self.sampling_rate,
            "rounds": self.rounds,
            "steps": self.steps,
            "round-steps": self.round_steps,
            "ledger": self.ledger.to_text(),
            "head": self.head,
        }
        if self.target_epsilon is not None:
            fields["target-epsilon"] = self.target_epsilon
        return config_record(fields)

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Self:
        """Read a statement back.

        Raises:
            ProtocolError: a field is missing or malformed.
        """
        fields: dict[str, Any] = dict(record.items())
        try:
            target = fields.get("target-epsilon")
            return cls(
                client=int(fields["client"]),
                examples=int(fields["examples"]),
                delta=float(fields["delta"]),
                noise_multiplier=float(fields["noise-multiplier"]),
                sampling_rate=float(fields["sampling-rate"]),
                target_epsilon=None if target is None else float(target),
                rounds=int(fields["rounds"]),
                steps=int(fields["steps"]),
                round_steps=int(fields["round-steps"]),
                ledger=PrivacyLedger.from_text(fields["ledger"]),
                head=str(fields["head"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"malformed privacy statement: {error!r}") from error


@dataclass(frozen=True)
class TrainRequest:
    """The server's request: train from these arrays in this round.

    `offer` is what secure aggregation needs beside them; None where updates are sent in clear.
    `clip_norm` is the bound that the client's clipping learnt in earlier rounds; None where it
    has not learnt one.
    """

    round_number: int
    arrays: ArrayRecord
    offer: ConfigRecord | None = None
    clip_norm: float | None = None

    def identity(self, model: str) -> str:
        """Return what tells this request from others of its round: all that an answer depends on.

        A client adds the same noise, times its bound, to every answer in a round: answers to the
        same model under two bounds would differ by a known multiple of it. So the bound counts.

        Args:
            model: digest of `arrays`.
        """
        if self.clip_norm is None:
            return model
        return hashlib.sha256(f"{model} {self.clip_norm!r}".encode()).hexdigest()

    def to_message(self, node_id: int) -> Message:
        """Address the request to one node."""
        config = config_record({ROUND: self.round_number})
        if self.clip_norm is not None:
            config[CLIP_NORM] = self.clip_norm
        content = record_dict({ARRAYS: self.arrays, CONFIG: config})
        if self.offer is not None:
            content[OFFER] = self.offer
        return Message(content, node_id, MessageType.TRAIN)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Read a request.

        Raises:
            ProtocolError: no arrays, no whole-numbered round ≥ 1, or no number > 0 as the bound.
        """
        arrays = record_of(message.content, ARRAYS, ArrayRecord)
        config = record_of(message.content, CONFIG, ConfigRecord)
        if arrays is None or config is None:
            raise ProtocolError(f"a request needs the records {ARRAYS!r} and {CONFIG!r}")
        round_number = config.get(ROUND)
        if not isinstance(round_number, int) or round_number < 1:
            raise ProtocolError(f"{CONFIG}.{ROUND} must be a whole number >= 1, got {round_number}")
        offer = record_of(message.content, OFFER, ConfigRecord)
        return cls(round_number, arrays, offer, _clip_norm(config))


@dataclass(frozen=True)
class TrainReply:
    """A client's answer: trained arrays, public weight, and a privacy statement if private.

    `delay` is how late it is, in simulated seconds. `clip_norm` is the bound that its clipping has
    learnt, a release that the round was charged for; None where it does not learn.
    """

    arrays: ArrayRecord
    examples: int
    privacy: PrivacyStatement | None
    delay: float = 0.0
    clip_norm: float | None = None

    def to_message(self, request: Message) -> Message:
        """Make the reply to `request`."""
        content = record_dict(
            {
                ARRAYS: self.arrays,
                METRICS: metric_record({NUM_EXAMPLES: self.examples}),
                **side_records(self.privacy, self.delay),
            }
        )
        if self.clip_norm is not None:
            content[LEARNT] = config_record({CLIP_NORM: self.clip_norm})
        return Message(content, reply_to=request)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Read a reply.

        Raises:
            ProtocolError: a record is missing or malformed.
        """
        arrays = record_of(message.content, ARRAYS, ArrayRecord)
        metrics = record_of(message.content, METRICS, MetricRecord)
        if arrays is None or metrics is None:
            raise ProtocolError(f"a train reply needs the records {ARRAYS!r} and {METRICS!r}")
        examples = metrics.get(NUM_EXAMPLES)
        if not isinstance(examples, int) or examples < 0:
            raise ProtocolError(f"{METRICS}.{NUM_EXAMPLES} must be >= 0, got {examples}")
        learnt = record_of(message.content, LEARNT, ConfigRecord)
        clip_norm = None if learnt is None else _clip_norm(learnt)
        return cls(arrays, examples, *read_side_records(message), clip_norm)


@dataclass(frozen=True)
class EvaluateRequest:
    """The server's request: score the model after this round on held-out examples."""

    round_number: int
    arrays: ArrayRecord

    def to_message(self, node_id: int) -> Message:
        """Address the request to one node."""
        config = config_record({ROUND: self.round_number})
        content = record_dict({ARRAYS: self.arrays, CONFIG: config})
        return Message(content, node_id, MessageType.EVALUATE)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Read a request.

        Raises:
            ProtocolError: no arrays, or no whole-numbered round ≥ 1.
        """
        request = TrainRequest.from_message(message)
        return cls(request.round_number, request.arrays)


@dataclass(frozen=True)
class EvaluateReply:
    """What a client found: means over its held-out examples, and how many there are.

    `delay` is how late it is, in simulated seconds.
    """

    examples: int
    metrics: Mapping[str, float]
    delay: float = 0.0

    def to_message(self, request: Message) -> Message:
        """Make the reply to `request`."""
        metrics = metric_record({NUM_EXAMPLES: self.examples, **self.metrics})
        content = record_dict({METRICS: metrics, **side_records(None, self.delay)})
        return Message(content, reply_to=request)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Read a reply.

        Raises:
            ProtocolError: a record is missing or malformed.
        """
        record = record_of(message.content, METRICS, MetricRecord)
        if record is None:
            raise ProtocolError(f"an evaluate reply needs the record {METRICS!r}")
        metrics: dict[str, Any] = dict(record)
        examples = metrics.pop(NUM_EXAMPLES, None)
        if not isinstance(examples, int) or examples < 0:
            raise ProtocolError(f"{METRICS}.{NUM_EXAMPLES} must be >= 0, got {examples}")
        if not all(isinstance(value, float) for value in metrics.values()):
            raise ProtocolError(f"{METRICS} must be numbers, got {metrics}")
        return cls(examples, metrics, read_side_records(message)[1])


def side_records(privacy: PrivacyStatement | None, delay: float) -> dict[str, ConfigRecord]:
    """Return what a reply says beside its update: the privacy statement, and how late it is."""
    records: dict[str, ConfigRecord] = {}
    if privacy is not None:
        records[PRIVACY] = privacy.to_record()
    if delay:
        records[TIMING] = config_record({DELAY: delay})
    return records


def read_side_records(message: Message) -> tuple[PrivacyStatement | None, float]:
    """Read what a reply says beside its update.

    Raises:
        ProtocolError: a record is malformed.
    """
    privacy = record_of(message.content, PRIVACY, ConfigRecord)
    statement = None if privacy is None else PrivacyStatement.from_record(privacy)
    timing = record_of(message.content, TIMING, ConfigRecord)
    delay = 0.0 if timing is None else timing.get(DELAY)
    if not isinstance(delay, float) or not delay >= 0.0:
        raise ProtocolError(f"{TIMING}.{DELAY} must be a number of seconds, got {delay!r}")
    return statement, delay


@dataclass(frozen=True)
class Withdrawal:
    """A client's answer that it leaves the federation: its budget affords no further step."""

    client: int
    reason: str

    def to_message(self, request: Message) -> Message:
        """Make the reply to `request`."""
        fields = config_record({"client": self.client, "reason": self.reason})
        return Message(record_dict({WITHDRAWAL: fields}), reply_to=request)

    @classmethod
    def from_message(cls, message: Message) -> Self | None:
        """Read a withdrawal; None where the message is none.

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


def _clip_norm(record: ConfigRecord) -> float | None:
    value = record.get(CLIP_NORM)
    if value is not None and not (isinstance(value, float) and 0.0 < value < math.inf):
        raise ProtocolError(f"{CLIP_NORM} must be a finite number > 0, got {value!r}")
    return value


def record_of(content: RecordDict, name: str, kind: type[R]) -> R | None:
    """Return a record by name, None where there is none of the kind.

    Flower's own views of the records of a kind copy them all each time, and its `get` raises and
    catches an error where there is no such name, as there mostly is none.
    """
    if name not in content:
        return None
    record = content[name]
    return record if isinstance(record, kind) else None


@dataclass(frozen=True)
class NodeIdentity:
    """Which node this is: the client, or the helper, with this number."""

    number: int
    role: Literal["client", "helper"] = "client"


def roll_call_message(node_id: int) -> Message:
    """Ask a node who it is."""
    return Message(RecordDict(), node_id, ROLL_CALL_TYPE)


def roll_call_reply(identity: NodeIdentity, request: Message) -> Message:
    """Answer a roll call."""
    fields = config_record({PARTITION: identity.number, ROLE: identity.role})
    return Message(record_dict({IDENTITY: fields}), reply_to=request)


def identity_of(reply: Message) -> NodeIdentity:
    """Read the reply to a roll call.

    Raises:
        ProtocolError: the node failed to answer, or did not say who it is.
    """
    node = f"node {reply.metadata.src_node_id}"
    if reply.has_error():
        raise ProtocolError(f"{node} failed: {reply.error.reason}")
    record = record_of(reply.content, IDENTITY, ConfigRecord) or ConfigRecord()
    number, role = record.get(PARTITION), record.get(ROLE)
    if not isinstance(number, int):
        raise ProtocolError(f"{node} did not say which client or helper it is")
    if role == "client":
        return NodeIdentity(number, "client")
    if role == "helper":
        return NodeIdentity(number, "helper")
    raise ProtocolError(f"{node} must be a client or a helper, got the role {role!r}")


def digest(arrays: ArrayRecord) -> str:
    """Return the SHA-256 of the arrays' names, types, shapes and bytes, in their order."""
    state = hashlib.sha256()
    for name, array in arrays.items():
        header = json.dumps([name, array.dtype, list(array.shape), len(array.data)])
        state.update(header.encode())
        state.update(array.data)
    return state.hexdigest()


def to_numpy(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays by name."""
    return {name: array.numpy() for name, array in arrays.items()}


def to_arrays(values: dict[str, np.ndarray]) -> ArrayRecord:
    """Return the record of named arrays, in the given order."""
    return ArrayRecord({name: Array(value) for name, value in values.items()})
