"""Messages that several rules share."""

import math
from collections.abc import Iterable, Iterator

from fedsim.experiment.messages import PathMessage
from fedsim.experiment.text import KeyPath, value_text


def finite_messages(value: object, path: KeyPath) -> Iterator[PathMessage]:
    """Yield a message for every infinite number and NaN in free-form arguments."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, got {value_text(value)}"
    children: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, item in children:
        yield from finite_messages(item, (*path, key))


def messages_at(path: KeyPath, message: str | None) -> Iterator[PathMessage]:
    """Yield a message with its place, if there is one.

    Args:
        path: the keys that lead to the place.
        message: the message; None: there is no mistake.
    """
    if message is not None:
        yield path, message
