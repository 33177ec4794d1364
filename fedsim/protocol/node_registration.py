"""Node registration, in which the server asks every node which client or helper it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedsim.protocol.arrays import record_of
from fedsim.protocol.errors import ProtocolError

IDENTITY = "identity"
PARTITION = "partition-id"
ROLE = "role"

NODE_REGISTRATION = "node_registration"
REGISTRATION_TYPE = f"{MessageType.QUERY}.{NODE_REGISTRATION}"


@dataclass(frozen=True)
class NodeIdentity:
    """The role of a node (client or helper of secure aggregation), and its number in that role.

    Attributes:
        number: the client's number from 0, or the helper's number from 1.
        role: whether the node is a client or a helper of secure aggregation.
    """

    number: int
    role: Literal["client", "helper"] = "client"


@runtime_checkable
class NumberedGrid(Protocol):
    """A Flower grid that knows which client or helper each node is, as it created the nodes."""

    def numbered_nodes(self) -> Sequence[int] | None:
        """Return the node ids of all clients, by client number, and then of all helpers.

        The result is None if the grid does not know which node is which.
        """
        ...


def registration_message(node_id: int) -> Message:
    """Return the Flower message that asks a node for its identity."""
    return Message(RecordDict(), node_id, REGISTRATION_TYPE)


def registration_reply(identity: NodeIdentity, request: Message) -> Message:
    """Return a node's reply to the server's question for its identity.

    Args:
        identity: the identity of the node.
        request: the server's question.
    """
    fields = ConfigRecord({PARTITION: identity.number, ROLE: identity.role})
    return Message(RecordDict({IDENTITY: fields}), reply_to=request)


def identity_of(reply: Message) -> NodeIdentity:
    """Return the identity that a node states in its reply.

    Raises:
        ProtocolError: the reply does not name a client or helper.
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
