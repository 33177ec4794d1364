"""The roll call: the server asks every node which client or helper it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.messages import record_of

IDENTITY = "identity"
PARTITION = "partition-id"
ROLE = "role"

ROLL_CALL = "roll_call"
ROLL_CALL_TYPE = f"{MessageType.QUERY}.{ROLL_CALL}"


@dataclass(frozen=True)
class NodeIdentity:
    """The role and the number of a node."""

    number: int
    role: Literal["client", "helper"] = "client"


@runtime_checkable
class NumberedGrid(Protocol):
    """A grid that made its nodes: it knows which client or helper each one is."""

    def numbered_nodes(self) -> Sequence[int] | None:
        """Return the ids of all clients by number, then of all helpers; None: ask the nodes."""
        ...


def roll_call_message(node_id: int) -> Message:
    """Return the question to one node."""
    return Message(RecordDict(), node_id, ROLL_CALL_TYPE)


def roll_call_reply(identity: NodeIdentity, request: Message) -> Message:
    """Return a node's answer to a roll call.

    Args:
        identity: of the node.
        request: the question.
    """
    fields = ConfigRecord({PARTITION: identity.number, ROLE: identity.role})
    return Message(RecordDict({IDENTITY: fields}), reply_to=request)


def identity_of(reply: Message) -> NodeIdentity:
    """Return the identity in the reply to a roll call.

    Raises:
        ProtocolError: the reply names no client or helper.
    """
    node = f"node {reply.metadata.src_node_id}"
    record = record_of(reply.content, IDENTITY, ConfigRecord) or ConfigRecord()
    number, role = record.get(PARTITION), record.get(ROLE)
    if not isinstance(number, int):
        raise ProtocolError(f"{node} did not say which client or helper it is")
    if role == "client":
        return NodeIdentity(number, "client")
    if role == "helper":
        return NodeIdentity(number, "helper")
    raise ProtocolError(f"{node} must be a client or a helper, got the role {role!r}")
