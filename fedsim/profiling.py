"""A sampling profiler that writes what people can open: speedscope's JSON."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"

Stack = tuple[
    tuple[str, str, int], ...
]  # (function, file, line of its definition), outermost first


class Sampler:
    """Looks at the stack of the thread that makes it, every few milliseconds, from another thread.

    Time that torch or the disk takes counts towards the Python function that called it. Looking
    costs about a hundredth of the time.

    Args:
        interval: seconds between two looks.
    """

    def __init__(self, interval: float = 0.005) -> None:
        self._interval = interval
        self._watched = threading.get_ident()
        self._samples: list[tuple[Stack, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="fedsim-profile", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
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

    def _look(self) -> None:
        before = time.perf_counter()
        while not self._done.wait(self._interval):
            frame = sys._current_frames().get(self._watched)
            now = time.perf_counter()
            self._samples.append((_stack(frame), now - before))
            before = now


@contextmanager
def profiled(path: Path | None, *, name: str) -> Iterator[None]:
    """Profile what runs inside and write it to `path`, whatever happens; None: do nothing."""
    if path is None:
        yield
        return
    sampler = Sampler()
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()
        path.write_text(json.dumps(sampler.to_speedscope(name)), encoding="utf-8")


def _stack(frame: FrameType | None) -> Stack:
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(
            (
                code.co_qualname if hasattr(code, "co_qualname") else code.co_name,
                code.co_filename,
                code.co_firstlineno,
            )
        )
        frame = frame.f_back
    return tuple(reversed(found))
