"""Settings of the whole suite, made before torch and numpy are imported."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

# The tests are many small computations: a second thread has nothing to do but wait, and on a busy
# machine waiting threads take the processor from everybody.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


class _StopAfter:
    """An observer that interrupts the run when a round is finished."""

    def __init__(self, round_number: int) -> None:
        self._round = round_number

    def started(self, federation: object, path: Path) -> None: ...

    def round_finished(self, row: Mapping[str, Any]) -> None:
        if row["round"] == self._round:
            raise KeyboardInterrupt

    def ended(self) -> None: ...


def pytest_configure(config: pytest.Config) -> None:
    """Let two processes begin with the files as they come, not with those of the most tests.

    A deployment is one long test that mostly waits: last of all, it would have nobody beside it.
    """
    if hasattr(config.option, "loadscopereorder"):  # of pytest-xdist
        config.option.loadscopereorder = False


@pytest.fixture(scope="session")
def stop_after() -> Callable[[int], _StopAfter]:
    """Make observers that interrupt a run after a round."""
    return _StopAfter
