"""What crosses Ray by an ordinary pickle.

Ray pickles with cloudpickle, which looks at every object whether it is a function or a class that
only this process has. Over the many small objects of messages and charges that takes three times
as long as the pickler in C. Large arrays still travel beside the pickle, without a copy.
"""

import pickle
from typing import Any

from ray import cloudpickle


class Packed:
    """Arrives as the value that it is made of."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        beside: list[pickle.PickleBuffer] = []

        def is_inside(buffer: pickle.PickleBuffer) -> bool:
            small = buffer.raw().nbytes < _LARGE
            if not small:
                beside.append(buffer)
            return small

        try:
            content = pickle.dumps(self._value, protocol=5, buffer_callback=is_inside)
        except (pickle.PicklingError, AttributeError, TypeError):  # what only cloudpickle knows
            beside.clear()
            dumps: Any = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage]
            content = dumps(self._value, protocol=5, buffer_callback=is_inside)
        return unpacked, (content, *beside)


def unpacked(content: bytes, *beside: Any) -> Any:
    """Return what was packed."""
    return pickle.loads(content, buffers=beside)


_LARGE = 1 << 15  # bytes; a buffer of its own costs as much as copying a few times this
