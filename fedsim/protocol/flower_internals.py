"""The only module that uses Flower's private modules; docs/decisions/flower.md lists what it uses.

These private parts are checked against flwr 1.40 and 1.41. Flower has no public way to:

- set the id of a message: in a deployment Flower's link does so, and a strategy may match replies
  to requests by this id;
- create the description of a run, which `Grid.run` must return;
- make the process a task of a run: Flower creates messages only inside such a task;
- read the error code by which Flower reports that a client's code raised an exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode

CLIENT_RAISED = int(ErrorCode.CLIENT_APP_RAISED_EXCEPTION)


def empty_run(run_id: int) -> Any:
    """Return Flower's description of a run, with the given id, for the method `Grid.run`."""
    from flwr.supercore.run import Run

    return Run.create_empty(run_id)


def set_message_id(message: Message, message_id: str) -> None:
    """Set the id of a message; in a deployment Flower's link sets it.

    Args:
        message: the message, changed in place.
        message_id: an id that is unique in the run.
    """
    message.metadata.__dict__["_message_id"] = message_id


def replace_content(message: Message, content: RecordDict) -> Message:
    """Return a message with new content and the same metadata.

    Args:
        message: a message with content, left unchanged.
        content: records of the new message.
    """
    copied = copy(message)
    copied.content = content
    return copied


@contextmanager
def server_identity(run_id: int) -> Iterator[None]:
    """Make this process the server task of a run, within a `with` block.

    Flower creates messages only inside a task.
    """
    from flwr.supercore.task_identity import TaskIdentity

    with preserve_identity():
        TaskIdentity.run_id, TaskIdentity.task_id = run_id, 1
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        yield


@contextmanager
def preserve_identity() -> Iterator[None]:
    """Restore this process's task identity, a global state of Flower, after the `with` block."""
    from flwr.supercore.task_identity import TaskIdentity

    names = ("_run_id", "_task_id", "_node_id")
    before = {name: getattr(TaskIdentity, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)
