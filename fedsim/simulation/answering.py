"""How clients of one process answer: at once where their app can, else one after the other."""

from collections.abc import Iterator, Sequence

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp

from fedsim.clients.many import ManyAnswers


def answers_of(
    app: ClientApp, requests: Sequence[tuple[Message, Context]]
) -> Iterator[Message | Exception]:
    """Yield the answer to each request, in their order, or what the client raised instead.

    Args:
        app: the clients.
        requests: messages of one kind, with the contexts of the clients that they are for.
    """
    train = bool(requests) and requests[0][0].metadata.message_type == MessageType.TRAIN
    if isinstance(app, ManyAnswers) and train:
        yield from app.answer_many(requests)
        return
    for message, context in requests:
        try:
            yield app(message, context)
        except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
            yield error
