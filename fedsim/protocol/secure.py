"""Secure aggregation on Flower messages: its values as records, and the names of its questions.

Every byte of the protocol crosses a Flower `Message`. An update leaves a client as a
`SealedReply`, which has no place for arrays, a weight or metrics in clear.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedsim.protocol.arrays import to_arrays
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.live_arrays import live_record
from fedsim.protocol.messages import (
    read_side_records,
    side_records,
)
from fedsim.secagg import wire
from fedsim.secagg.messages import KeysReply, Upload

SECAGG = "secagg"
SECAGG_ARRAYS = "secagg-arrays"

# Leader to helper; the rest of them server to client, for pairwise masks.
HELLO, COMBINE = "secagg_hello", "secagg_combine"
SHARES, MASKED, UNMASK = "secagg_shares", "secagg_masked", "secagg_unmask"

T = TypeVar("T")


def to_records(
    message: object, *, live: bool = False, name: str = SECAGG
) -> dict[str, ConfigRecord | ArrayRecord]:
    """Return the records of a protocol message, or of a state built like one.

    Args:
        message: a dataclass of the protocol.
        live: share the arrays' numbers within this process; they are then taken over.
        name: of the record with its fields; "-arrays" is appended for the one with its arrays.
    """
    record = wire.to_record(message)
    records: dict[str, ConfigRecord | ArrayRecord] = {name: ConfigRecord({**record.config})}
    if record.arrays:
        arrays: dict[str, np.ndarray] = {**record.arrays}
        records[f"{name}-arrays"] = live_record(arrays) if live else to_arrays(arrays)
    return records


def from_records(kind: type[T], content: RecordDict, *, name: str = SECAGG) -> T:
    """Read a protocol message back.

    Raises:
        SecureAggregationError: the other side refused, by the name of its error.
        WireError, ShareMismatchError: no such message, or a malformed one.
    """
    config: Mapping[str, object] = content.config_records.get(name) or {}
    arrays = content.array_records.get(f"{name}-arrays") or {}
    return wire.from_record(kind, dict(config), {key: one.numpy() for key, one in arrays.items()})


def question(stage: str, message: object, node_id: int) -> Message:
    """Ask a node a question of the protocol."""
    return Message(RecordDict({**to_records(message)}), node_id, f"{MessageType.QUERY}.{stage}")


def answer(message: object, request: Message) -> Message:
    """Answer a question of the protocol."""
    return Message(RecordDict({**to_records(message)}), reply_to=request)


@dataclass(frozen=True)
class SealedReply:
    """A client's answer to a train request under secure aggregation.

    Attributes:
        content: the protocol's records: a share with sealed seeds, or public keys.
        spend: what the client has spent; None without privacy.
        delay: how late the reply is, in simulated seconds.
    """

    content: RecordDict
    spend: ClientSpend | None
    delay: float = 0.0
    clip_norm: float | None = None

    @classmethod
    def of(
        cls,
        sealed: Upload | KeysReply,
        *,
        spend: ClientSpend | None,
        delay: float,
        live: bool,
    ) -> Self:
        """Return the answer that carries a sealed update."""
        return cls(RecordDict({**to_records(sealed, live=live)}), spend, delay)

    def to_message(self, request: Message) -> Message:
        """Make the reply to `request`."""
        content = RecordDict({**self.content, **side_records(self.spend, self.delay)})
        return Message(content, reply_to=request)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Read a reply.

        Raises:
            ProtocolError: it carries no sealed update, or more than one may.
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
