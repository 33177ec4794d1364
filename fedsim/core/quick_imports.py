"""Imports of a command without garbage collection, which takes a sixth of their time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage in the block, and never again look at what is there at its end.

    Imports create half a million objects that all stay, and the collector would visit them again
    and again. For programs only: in the process of another program, its garbage would stay, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
