"""Secure aggregation on Flower messages: its records and its message types.

Every byte of the protocol crosses a Flower `Message`.
"""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedsim.protocol.arrays import live_record, to_arrays
from fedsim.protocol.messages import SECAGG
from fedsim.secagg import wire

HELLO, COMBINE = "secagg_hello", "secagg_combine"  # leader to helper

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
