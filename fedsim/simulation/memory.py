"""Keeping freed memory in the process, for the tensors of the next step."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)
_LARGEST_MMAP_THRESHOLD = 32 << 20
# New objects until the youngest are looked at: those of ten to forty steps of a model, in case that
# its tensors are part of cycles. Then how often older ones are.
_RARE = (20_000, 10, 50)


def keep_freed_memory() -> bool:
    """Tell the C library to reuse freed memory instead of returning it to the system.

    Training allocates and frees the same tensors in every step. By default glibc gives blocks of
    more than 128 kB back, and the next step pays a page fault for each 4 kB of them, which can
    cost more than the arithmetic. Changes no result; the process keeps its peak memory.

    Returns:
        Whether the C library took the settings (glibc only; elsewhere nothing happens).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_TRIM_THRESHOLD, 2**31 - 1),
        (_TOP_PAD, 64 << 20),
    )
    return all(mallopt(name, value) == 1 for name, value in settings)


def freeze_objects() -> None:
    """Let the garbage collector leave out all objects that exist now, and look less often."""
    gc.freeze()
    gc.set_threshold(*_RARE)


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Let the garbage collector leave out all objects that exist now, and look less often.

    Messages make it run often, and each full collection would walk through the hundreds of
    thousands of objects of torch and Flower, none of which is garbage. By Python's own thresholds
    it takes a twentieth of a round of small clients, whose messages of a round it walks through
    again and again.
    """
    thresholds = gc.get_threshold()
    freeze_objects()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
