"""Conversion of secure aggregation messages to Flower messages and back.

Every byte of the secure aggregation protocol is sent in a Flower `Message`.
"""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

from fedsim.protocol.arrays import live_record, read_arrays, to_arrays
from fedsim.protocol.messages import SECAGG
from fedsim.secagg import wire
from fedsim.secagg.errors import WireError

HELLO, COMBINE = "secagg_hello", "secagg_combine"  # leader to helper

_T = TypeVar("_T")


def to_records(
    message: object, *, live: bool = False, name: str = SECAGG
) -> dict[str, ConfigRecord | ArrayRecord]:
    """Return the Flower records of a secure aggregation message, or of a client's saved state.

    Args:
        message: a dataclass of `fedsim.secagg.messages`, or a saved state with fields of the same
            types.
        live: whether arrays stay in this process and are shared without a copy; the caller must
            not change them afterwards.
        name: the name of the record of plain fields. The record of arrays has this name with the
            suffix "-arrays".
    """
    record = wire.to_record(message)
    records: dict[str, ConfigRecord | ArrayRecord] = {name: ConfigRecord({**record.config})}
    if record.arrays:
        arrays: dict[str, np.ndarray] = {**record.arrays}
        records[f"{name}-arrays"] = live_record(arrays) if live else to_arrays(arrays)
    return records


def from_records(kind: type[_T], content: RecordDict, *, name: str = SECAGG) -> _T:
    """Return the secure aggregation message that a Flower message holds.

    Args:
        kind: the class of the expected message.
        content: the records of the Flower message.
        name: the name of the record of plain fields, as in `to_records`.

    Raises:
        SecureAggregationError: the other party refused the request; its error is raised here.
        WireError, ShareMismatchError: the message is missing or malformed.
    """
    config: Mapping[str, object] = content.config_records.get(name) or {}
    try:
        arrays = read_arrays(content.array_records.get(f"{name}-arrays") or ArrayRecord())
    except ValueError as error:
        raise WireError(str(error)) from error
    return wire.from_record(kind, dict(config), arrays)


def load_state(kind: type[_T], context: Context, *, name: str) -> _T | None:
    """Return the state of a party that Flower's context stores; None before the first.

    Args:
        kind: the class of the state.
        context: Flower's context of the party's node.
        name: the name of the state's record of plain fields.
    """
    if name not in context.state.config_records:
        return None
    return from_records(kind, context.state, name=name)


def save_state(state: object, context: Context, *, name: str) -> None:
    """Store a party's state in Flower's context, which `load_state` reads.

    Args:
        state: the state, with fields of the types that messages have.
        context: Flower's context of the party's node.
        name: the name of the state's record of plain fields.
    """
    for key, record in to_records(state, name=name).items():
        context.state[key] = record


def make_query(stage: str, message: object, node_id: int) -> Message:
    """Return a secure aggregation query as a Flower message.

    Args:
        stage: the Flower message type of the protocol's step, such as `HELLO`.
        message: a dataclass of `fedsim.secagg.messages`.
        node_id: the id of the node that receives the query.
    """
    return Message(RecordDict({**to_records(message)}), node_id, f"{MessageType.QUERY}.{stage}")


def make_reply(message: object, request: Message) -> Message:
    """Return a secure aggregation reply as a Flower message.

    Args:
        message: a dataclass of `fedsim.secagg.messages`.
        request: the query that the reply answers.
    """
    return Message(RecordDict({**to_records(message)}), reply_to=request)
