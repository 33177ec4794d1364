"""Flower ClientApp of a helper node, a party of secure aggregation beside server and clients."""

from collections.abc import Callable
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsim.core.limits import MAX_CLIENTS
from fedsim.protocol.node_registration import NODE_REGISTRATION, NodeIdentity, registration_reply
from fedsim.protocol.secure import COMBINE, HELLO, from_records, load_state, make_reply, save_state
from fedsim.secagg import wire
from fedsim.secagg.errors import SecureAggregationError
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.messages import CombineRequest, Hello
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.secure.helper import Helper, HelperRelease, HelperState

HELPER_STATE_RECORD = "secagg-helper"
_Question = TypeVar("_Question", Hello, CombineRequest)


def make_helper_app(
    settings: SecureAggregationSettings,
    number_of: Callable[[Context], int],
    identity_of: Callable[[Context], IdentityKey | None] = lambda _: None,
    record_of: Callable[[Context, HelperRelease], None] = lambda _, __: None,
    num_clients: int = MAX_CLIENTS,
) -> ClientApp:
    """Return the ClientApp of a helper node.

    Guarantee: the helper's state is in `Context.state` before its reply leaves. Errors are sent as
    replies and not raised. An engine may discard the state of an app that raised, and so forget
    which round was answered.

    Args:
        settings: the secure-aggregation settings of the helper's experiment.
        number_of: function that returns the helper number of a node, ≥ 1.
        identity_of: function that returns the long-term key of a node, which signs the node's key
            of every run. It is called at the first message of a run. A SecureAggregationError that
            it raises becomes the reply.
        record_of: function that writes a release to the node's disk before the sum leaves. It
            raises SecureAggregationError to refuse the release.
        num_clients: the number of clients in the node's experiment.
    """
    app = ClientApp()

    def answer(
        message: Message,
        context: Context,
        kind: type[_Question],
        ask: Callable[[Helper, _Question], object],
        identity_of: Callable[[Context], IdentityKey | None] = lambda _: None,
    ) -> Message:
        try:
            helper = Helper(
                helper=number_of(context),
                settings=settings,
                state=load_state(HelperState, context, name=HELPER_STATE_RECORD),
                identity=identity_of(context),
                record=lambda release: record_of(context, release),
                num_clients=num_clients,
            )
            reply = ask(helper, from_records(kind, message.content))
            save_state(helper.state, context, name=HELPER_STATE_RECORD)
        except SecureAggregationError as error:
            reply = wire.to_refusal(error)
        return make_reply(reply, message)

    @app.query(NODE_REGISTRATION)
    def node_registration(message: Message, context: Context) -> Message:
        return registration_reply(NodeIdentity(number_of(context), "helper"), message)

    @app.query(HELLO)
    def hello(message: Message, context: Context) -> Message:
        return answer(message, context, Hello, Helper.hello, identity_of)

    @app.query(COMBINE)
    def combine(message: Message, context: Context) -> Message:
        return answer(message, context, CombineRequest, Helper.combine)

    return app
