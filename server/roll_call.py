"""The roll call before the first round: which node is which client or helper."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from fedsim.protocol.channel import NO_REPLY, ClientError, exchange
from fedsim.protocol.errors import NODE_RESTARTED, FederationError, ProtocolError
from fedsim.protocol.roll_call import NodeIdentity, NumberedGrid, identity_of, roll_call_message

# Flower's error codes for a message or a node that is no longer there, and that of a restart.
_GONE = {3, 4, 5, NODE_RESTARTED}


@dataclass(frozen=True)
class Roll:
    """The client or helper of each node, by node id."""

    clients: Mapping[int, int]
    helpers: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Mapping[int, NodeIdentity]) -> "Roll":
        """Split nodes into clients and helpers."""

        def numbers(role: str) -> dict[int, int]:
            return {node: one.number for node, one in nodes.items() if one.role == role}

        return cls(numbers("client"), numbers("helper"))


def call_roll(grid: Grid, num_clients: int, *, patience: float) -> Mapping[int, int]:
    """Wait for all clients and return the client of each node, by node id; see `whole_roll`."""
    return whole_roll(grid, num_clients, 0, patience=patience).clients


def whole_roll(grid: Grid, num_clients: int, num_helpers: int, *, patience: float) -> Roll:
    """Wait for all clients and helpers, and return the role of each node.

    Flower's simulation starts the server before its nodes exist. A round with the nodes of that
    moment would silently change the participants. Nodes that are listed but gone, such as a
    SuperNode before its restart, are skipped. A grid that made the nodes itself is asked instead.

    Args:
        grid: reaches the nodes.
        num_clients: clients of the federation.
        num_helpers: helpers of secure aggregation.
        patience: seconds to wait.

    Raises:
        FederationError: fewer nodes than parties within `patience` seconds, or two nodes are the
            same client or helper.
        ProtocolError: a node reports that it cannot take part; the message says why.
    """
    deadline = time.monotonic() + patience
    expected = num_clients + num_helpers
    known = grid.numbered_nodes() if isinstance(grid, NumberedGrid) else None
    if known is not None and len(known) == expected:
        return Roll(
            {node: client for client, node in enumerate(known[:num_clients])},
            {node: helper for helper, node in enumerate(known[num_clients:], start=1)},
        )
    there: dict[int, NodeIdentity] = {}
    while len(there) < expected:
        nodes = _wait_for_nodes(grid, expected, deadline, patience)
        answers = exchange(
            grid,
            {node: roll_call_message(node) for node in nodes},
            timeout=max(1.0, deadline - time.monotonic()),
        )
        there = {node: _identity(node, answer) for node, answer in answers if not _is_gone(answer)}
        if len(there) < expected:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
    roll = Roll.of(there)
    _check_all("client", roll.clients, range(num_clients))
    _check_all("helper", roll.helpers, range(1, num_helpers + 1))
    return roll


def _is_gone(answer: Message | ClientError) -> bool:
    return isinstance(answer, ClientError) and (answer is NO_REPLY or answer.code in _GONE)


def _identity(node: int, answer: Message | ClientError) -> NodeIdentity:
    if isinstance(answer, ClientError):
        raise ProtocolError(f"node {node} failed: {answer.reason}")
    return identity_of(answer)


def _check_all(role: str, found: Mapping[int, int], wanted: range) -> None:
    if sorted(found.values()) != list(wanted):
        numbers = f"{wanted.start}..{wanted.stop - 1}" if wanted else "none"
        raise FederationError(
            f"expected one node for each of the {role}s {numbers}, "
            f"got {role}s {sorted(found.values())}"
        )


def _wait_for_nodes(grid: Grid, num_clients: int, deadline: float, patience: float) -> list[int]:
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= num_clients:
            return nodes
        if time.monotonic() > deadline:
            raise FederationError(
                f"only {len(nodes)} of {num_clients} nodes connected within {patience:g} s"
            )
        time.sleep(0.05)
