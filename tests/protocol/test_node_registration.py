"""A node's role and number survive the node registration, and no reply without them is taken."""

from collections.abc import Iterator

import pytest
from flwr.app import Message, RecordDict

from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.node_registration import (
    NodeIdentity,
    identity_of,
    registration_message,
    registration_reply,
)


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
