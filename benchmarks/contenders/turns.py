"""A library that runs its own loop of rounds, made to do one round at a time."""

from collections.abc import Callable
from queue import Queue
from threading import Thread
from typing import Self


class Turns:
    """Runs `body` in a thread and lets it go on round by round.

    Args:
        body: calls `go_on` before every round, returns when that is False, and `done` after.
    """

    def __init__(self, body: Callable[[Self], None]) -> None:
        self._orders: Queue[bool] = Queue()
        self._ends: Queue[BaseException | None] = Queue()
        self._thread = Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def go_on(self) -> bool:
        """Wait, in the body, until a round is wanted; False if none will be."""
        return self._orders.get()

    def done(self) -> None:
        """Say, in the body, that a round has ended."""
        self._ends.put(None)

    def round(self) -> None:
        """Have one round done; raise what the body raised."""
        self._orders.put(True)
        error = self._ends.get()
        if error is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def stop(self) -> None:
        """Let the body end and wait for it."""
        self._orders.put(False)
        self._thread.join(timeout=60)

    def _run(self, body: Callable[[Self], None]) -> None:
        try:
            body(self)
        except BaseException as error:  # noqa: BLE001  raised again where the round was asked for
            self._ends.put(error)
        else:
            self._ends.put(RuntimeError("the loop ended without being told"))
