"""Values that cross Ray by Python's own pickle, which is faster than Ray's.

Ray uses cloudpickle, which checks for every object whether it is a function or class of this
process only. For the many small objects of messages and charges that takes three times as long as
the pickler in C. Large arrays still travel beside the pickle, without a copy.
"""

import pickle
from typing import Any

from ray import cloudpickle


class FastPickle:
    """A wrapper that unpickles as its value.

    Args:
        value: any value that can be pickled.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        beside: list[pickle.PickleBuffer] = []

        def is_inside(buffer: pickle.PickleBuffer) -> bool:
            small = buffer.raw().nbytes < _MIN_OUT_OF_BAND_BYTES
            if not small:
                beside.append(buffer)
            return small

        try:
            content = pickle.dumps(self._value, protocol=5, buffer_callback=is_inside)
        except (pickle.PicklingError, AttributeError, TypeError):  # needs cloudpickle
            beside.clear()
            dumps: Any = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage]
            content = dumps(self._value, protocol=5, buffer_callback=is_inside)
        return unpack, (content, *beside)


def unpack(content: bytes, *beside: Any) -> Any:
    """Return the pickled value.

    Args:
        content: the pickle.
        beside: its large buffers.
    """
    return pickle.loads(content, buffers=beside)


_MIN_OUT_OF_BAND_BYTES = 1 << 15  # a separate buffer costs as much as a few copies of this size
