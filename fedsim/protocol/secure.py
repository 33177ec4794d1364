"""Secure aggregation on Flower messages: its records and its message types.

Every byte of the protocol crosses a Flower `Message`. An update leaves a client as a
`SealedReply`, which cannot hold arrays, a weight or metrics in clear.
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
from fedsim.protocol.messages import read_side_records, side_records
from fedsim.secagg import wire
from fedsim.secagg.messages import KeysReply, Upload

SECAGG = "secagg"
SECAGG_ARRAYS = "secagg-arrays"

HELLO, COMBINE = "secagg_hello", "secagg_combine"  # leader to helper
SHARES, MASKED, UNMASK = "secagg_shares", "secagg_masked", "secagg_unmask"  # server to client

_T = TypeVar("_T")


def to_records(
    message: object, *, live: bool = False, name: str = SECAGG
) -> dict[str, ConfigRecord | ArrayRecord]:
    """Return the records of a protocol message, or of a state with fields of such types.

    Args:
        message: a dataclass of the protocol.
        live: whether arrays stay in this process and are shared without a copy; the caller must
            not change them afterwards.
        name: name of the record of plain fields; that of the arrays gets "-arrays" appended.
    """
    record = wire.to_record(message)
    records: dict[str, ConfigRecord | ArrayRecord] = {name: ConfigRecord({**record.config})}
    if record.arrays:
        arrays: dict[str, np.ndarray] = {**record.arrays}
        records[f"{name}-arrays"] = live_record(arrays) if live else to_arrays(arrays)
    return records


def from_records(kind: type[_T], content: RecordDict, *, name: str = SECAGG) -> _T:
    """Return the protocol message in a Flower message.

    Args:
        kind: class of the expected message.
        content: records of the Flower message.
        name: name of the record of plain fields, as in `to_records`.

    Raises:
        SecureAggregationError: the other party refused; its own error is raised.
        WireError, ShareMismatchError: the message is missing or malformed.
    """
    config: Mapping[str, object] = content.config_records.get(name) or {}
    arrays = content.array_records.get(f"{name}-arrays") or {}
    return wire.from_record(kind, dict(config), {key: one.numpy() for key, one in arrays.items()})


def make_query(stage: str, message: object, node_id: int) -> Message:
    """Return the Flower message of a query.

    Args:
        stage: message type, such as `HELLO`.
        message: a dataclass of the protocol.
        node_id: node that receives it.
    """
    return Message(RecordDict({**to_records(message)}), node_id, f"{MessageType.QUERY}.{stage}")


def make_reply(message: object, request: Message) -> Message:
    """Return the Flower message of a reply.

    Args:
        message: a dataclass of the protocol.
        request: the query.
    """
    return Message(RecordDict({**to_records(message)}), reply_to=request)


@dataclass(frozen=True)
class SealedReply:
    """A client's reply to a train request under secure aggregation.

    Attributes:
        content: records of the protocol: a share with sealed seeds, or public keys.
        spend: the client's spend, public under its adjacency; None without privacy.
        delay: delay of the reply in simulated seconds.
        clip_norm: always None; adaptive clipping is refused under secure aggregation.
    """

    content: RecordDict
    spend: ClientSpend | None
    delay: float = 0.0
    clip_norm: float | None = None

    @classmethod
    def from_upload(
        cls,
        sealed: Upload | KeysReply,
        *,
        spend: ClientSpend | None,
        delay: float,
        live: bool,
    ) -> Self:
        """Return the reply with a sealed update.

        Args:
            sealed: the client's upload, or its public keys.
            spend: the client's spend; None without privacy.
            delay: delay of the reply in simulated seconds.
            live: whether arrays stay in this process.
        """
        return cls(RecordDict({**to_records(sealed, live=live)}), spend, delay)

    def to_message(self, request: Message) -> Message:
        """Return the Flower message of the reply to `request`."""
        content = RecordDict({**self.content, **side_records(self.spend, self.delay)})
        return Message(content, reply_to=request)

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Return the sealed reply in a Flower message.

        Raises:
            ProtocolError: it has no sealed update, or also values in clear.
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
