"""Errors of the operating system with the name of their file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Give an OSError of the block the name of its file; a failed write carries none.

    Raises:
        OSError: as in the block, with `filename`.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
