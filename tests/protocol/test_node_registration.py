"""A node's role and number survive the node registration, and no reply without them is taken."""

from collections.abc import Iterable, Iterator
from typing import cast

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.node_registration import (
    NodeIdentity,
    identity_of,
    registration_message,
    registration_reply,
)
from fedsim.server.app import FederationError, register_nodes


@pytest.fixture(autouse=True)
def _server() -> Iterator[None]:
    with server_identity(1):
        yield


@pytest.mark.parametrize("identity", [NodeIdentity(6), NodeIdentity(0), NodeIdentity(1, "helper")])
def test_roll_call_tells_who_a_node_is(identity: NodeIdentity) -> None:
    request = registration_message(1001)
    assert identity_of(registration_reply(identity, request)) == identity
    with pytest.raises(ProtocolError, match="did not say which client or helper"):
        identity_of(Message(RecordDict(), reply_to=request))
    reply = registration_reply(identity, request)
    reply.content.config_records["identity"]["role"] = "spy"
    with pytest.raises(ProtocolError, match="role 'spy'"):
        identity_of(reply)


class _Silent:
    """A grid of three nodes, of which the first one does not answer."""

    def get_node_ids(self) -> list[int]:
        return [1001, 1002, 1003]

    def send_and_receive(self, messages: Iterable[Message], **options: object) -> Iterator[Message]:
        for number, message in enumerate(messages):
            if number == 0:
                yield Message(Error(3, "unavailable"), reply_to=message)
            else:
                yield registration_reply(NodeIdentity(number), message)


def test_a_node_that_does_not_answer_is_counted_not_named_a_wrong_client() -> None:
    with pytest.raises(FederationError, match="only 2 of 3 nodes answered within 0 s"):
        register_nodes(cast(Grid, _Silent()), 3, 0, patience=0.0)
