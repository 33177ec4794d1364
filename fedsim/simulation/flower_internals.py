"""The only place that touches Flower's private modules (checked against flwr 1.40 and 1.41)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode

CLIENT_RAISED = int(ErrorCode.CLIENT_APP_RAISED_EXCEPTION)


def empty_run(run_id: int) -> Any:
    """Return Flower's description of a run, which `Grid.run` must give."""
    from flwr.supercore.run import Run

    return Run.create_empty(run_id)


def stamp(message: Message, message_id: str) -> None:
    """Give a message the id that Flower's link would give it on the way."""
    message.metadata.__dict__["_message_id"] = message_id


def with_content(message: Message, content: RecordDict) -> Message:
    """Return the message with other content and the same metadata."""
    copied = Message.__new__(Message)  # its constructor checks a dozen arguments
    copied.__dict__.update(_metadata=message.metadata, _content=content, _error=None)
    return copied


@contextmanager
def server_identity(run_id: int) -> Iterator[None]:
    """Be the server task of a run: Flower refuses to make messages outside of one."""
    from flwr.supercore.task_identity import TaskIdentity

    with kept_identity():
        TaskIdentity.run_id, TaskIdentity.task_id = run_id, 1
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        yield


@contextmanager
def kept_identity() -> Iterator[None]:
    """Put back, in the end, which task this process is: in Flower that is global."""
    from flwr.supercore.task_identity import TaskIdentity

    names = ("_run_id", "_task_id", "_node_id")
    before = {name: getattr(TaskIdentity, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)
