"""Memory settings of a training process: reuse of freed memory, rare garbage collection."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)
_LARGEST_MMAP_THRESHOLD = 32 << 20
# 10 to 40 training steps create 20,000 objects; their tensors may be in reference cycles.
_GC_THRESHOLDS = (20_000, 10, 50)


def keep_freed_memory() -> bool:
    """Tell the C library to reuse freed memory instead of returning it to the system.

    Training allocates and frees the same tensors in every step. By default glibc returns blocks
    above 128 kB to the system, so the next step has a page fault for each 4 kB. That can take
    longer than the arithmetic. No result changes, but the process keeps its peak memory.

    Returns:
        Whether the C library accepted the settings. Without glibc nothing happens.
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
    """Exclude all existing objects from garbage collection, and make later collections rarer."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection during a `with` block.

    Collections are also rarer in the block. Messages trigger collections, and a full one visits
    hundreds of thousands of objects of torch and Flower that are not garbage. With Python's own
    thresholds that takes 5 % of a round of small clients.
    """
    thresholds = gc.get_threshold()
    freeze_objects()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
