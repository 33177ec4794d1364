"""A helper node as a Flower ClientApp: it opens seeds that clients sealed to it, and sums them."""

from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedsim.protocol.roll_call import (
    ROLL_CALL,
    NodeIdentity,
    roll_call_reply,
)
from fedsim.protocol.secure import COMBINE, HELLO, answer, from_records
from fedsim.secagg import wire
from fedsim.secagg.errors import SecureAggregationError
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.messages import CombineRequest, Hello
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.secure.helper import Helper, HelperState

STATE = "secagg-helper"


def make_helper_app(
    settings: SecureAggregationSettings,
    number_of: Callable[[Context], int],
    identity_of: Callable[[Context], IdentityKey | None] = lambda _: None,
) -> ClientApp:
    """Return the app of a node that is an aggregator beside the server.

    Guarantee: what the helper remembers is written to `Context.state` before its answer leaves,
    and errors are answered, not raised, since an engine may throw the state of an app away that
    raised, and with it that a round was answered.

    Args:
        settings: the helper's own settings.
        number_of: the number of the helper, ≥ 1, that a node is.
        identity_of: a node's lasting key, which signs the key of every run; read at the hello.
            May raise SecureAggregationError, which is answered.
    """
    app = ClientApp()

    @app.query(ROLL_CALL)
    def roll_call(message: Message, context: Context) -> Message:
        return roll_call_reply(NodeIdentity(number_of(context), "helper"), message)

    @app.query(HELLO)
    def hello(message: Message, context: Context) -> Message:
        return _answered(
            lambda: Helper(
                helper=number_of(context),
                settings=settings,
                state=_state(context),
                identity=identity_of(context),
            ),
            lambda helper: helper.hello(from_records(Hello, message.content)),
            message,
            context,
        )

    @app.query(COMBINE)
    def combine(message: Message, context: Context) -> Message:
        return _answered(
            lambda: Helper(helper=number_of(context), settings=settings, state=_state(context)),
            lambda helper: helper.combine(from_records(CombineRequest, message.content)),
            message,
            context,
        )

    def _answered(
        restored: Callable[[], Helper],
        ask: Callable[[Helper], object],
        message: Message,
        context: Context,
    ) -> Message:
        try:
            helper = restored()
            reply = ask(helper)
            context.state[STATE] = ConfigRecord({**helper.state.to_record()})
        except SecureAggregationError as error:
            reply = wire.refuse(error)
        return answer(reply, message)

    return app


def _state(context: Context) -> HelperState | None:
    record = context.state.config_records.get(STATE)
    return None if record is None else HelperState.from_record(dict(record))
