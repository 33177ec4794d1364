"""Sampling profiler that writes the JSON format of https://www.speedscope.app."""

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fedsim.core.errors import InputError, describe_os_error

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"

Stack = tuple[
    tuple[str, str, int], ...
]  # (function, file, line of its definition), outermost first


class StackSampler:
    """A profiler that samples the stack of the thread that created it, every few milliseconds.

    A second thread takes the samples. Time in torch or on the disk counts towards the Python
    function that called it. The overhead is about 1 % of the time.

    Args:
        interval_seconds: time between two samples, in seconds.
    """

    def __init__(self, interval_seconds: float = 0.005) -> None:
        self._interval_seconds = interval_seconds
        self._watched = threading.get_ident()
        self._samples: list[tuple[Stack, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="fedsim-profile", daemon=True)

    def start(self) -> None:
        """Start taking samples."""
        self._thread.start()

    def stop(self) -> None:
        """Stop taking samples."""
        self._done.set()
        self._thread.join()

    def to_speedscope(self, name: str) -> dict[str, object]:
        """Return the profile as the JSON that https://www.speedscope.app opens."""
        frames = {frame: None for stack, _ in self._samples for frame in stack}
        index = {frame: i for i, frame in enumerate(frames)}
        weights = [seconds for _, seconds in self._samples]
        return {
            "$schema": _SCHEMA,
            "name": name,
            "exporter": "fedsim",
            "shared": {
                "frames": [{"name": name, "file": file, "line": line} for name, file, line in index]
            },
            "profiles": [
                {
                    "type": "sampled",
                    "name": name,
                    "unit": "seconds",
                    "startValue": 0.0,
                    "endValue": sum(weights),
                    "samples": [[index[frame] for frame in stack] for stack, _ in self._samples],
                    "weights": weights,
                }
            ],
        }

    def _sample(self) -> None:
        before = time.perf_counter()
        while not self._done.wait(self._interval_seconds):
            frame = sys._current_frames().get(self._watched)
            now = time.perf_counter()
            self._samples.append((_stack(frame), now - before))
            before = now


@contextmanager
def profile_to(path: Path | None, *, name: str) -> Iterator[None]:
    """Profile the body of the `with` statement, and write the profile even after an exception.

    Args:
        path: path of the JSON file to write; None means no profile.
        name: name of the profile in the viewer.

    Raises:
        InputError: the file cannot be written; the body is not executed.
    """
    if path is None:
        yield
        return
    try:
        path.open("a").close()
    except OSError as error:
        message = f"the profile cannot be written: {describe_os_error(error)}"
        raise InputError(message) from error
    sampler = StackSampler()
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()
        path.write_text(json.dumps(sampler.to_speedscope(name)), encoding="utf-8")


def _stack(frame: FrameType | None) -> Stack:
    codes = [] if frame is None else [inner.f_code for inner, _ in traceback.walk_stack(frame)]
    return tuple(
        (code.co_qualname, code.co_filename, code.co_firstlineno) for code in reversed(codes)
    )
