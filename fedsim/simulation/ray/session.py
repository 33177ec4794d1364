"""Start of Ray for one run, with the program's own signal handlers and fast pickling.

Ray replaces the SIGTERM handler by one that ends the process without clean-up, and its native
library prints a stack dump. By default, Ray never deletes a session's files in /tmp/ray. This
module prevents all of that.

Ray uses cloudpickle, which checks for every object whether it is a function or class of this
process only. For the many small objects in messages and charges, it takes three times as long as
Python's pickler in C. Large arrays are still sent beside the pickle, without a copy.
"""

import logging
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray
from ray import cloudpickle
from ray._private import utils as ray_utils

# Ray's C++ library, which has no type stubs for its names.
ray_library: Any = import_module("ray._raylet")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHORT = Path("/tmp")  # the path of a socket has at most 107 characters


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """Run Ray on this machine during a `with` block, then remove its processes and files.

    A Ray instance that the caller has started is used as it is, and is not stopped.

    Args:
        options: options of `ray.init`.
    """
    if ray.is_initialized():
        yield
        return
    directory = mkdtemp(prefix="fedsim-ray-", dir=_SHORT if _SHORT.is_dir() else None)
    try:
        connect(
            address="local",  # else Ray joins a cluster that runs on this machine
            include_dashboard=False,
            _temp_dir=directory,
            **options,
        )
        yield
    finally:
        ray.shutdown()
        _kill_processes(directory)
        shutil.rmtree(directory, ignore_errors=True)


def connect(**options: Any) -> None:
    """Connect this process to Ray without output, and keep the program's signal handlers.

    A signal that arrives while Ray connects is handled once Ray is connected, because an unfinished
    connection cannot be closed.

    Args:
        options: options of `ray.init`.
    """
    with later_signals(), _own_sigterm():
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)


@contextmanager
def later_signals() -> Iterator[None]:
    """Delay the handling of SIGINT and SIGTERM to the end of a `with` block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in before:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep Ray and its native library from replacing the SIGTERM handler in a `with` block.

    The library replaces the handler at the operating system when the core worker is created.
    SIGTERM is blocked until Python's handler is restored.
    """
    set_handler, core_worker = ray_utils.set_sigterm_handler, ray_library.CoreWorker

    def make_core_worker(*arguments: Any, **options: Any) -> Any:
        handler = signal.getsignal(signal.SIGTERM)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return core_worker(*arguments, **options)
        finally:
            signal.signal(signal.SIGTERM, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    if threading.current_thread() is threading.main_thread():
        ray_utils.set_sigterm_handler = lambda handler: None
        ray_library.CoreWorker = make_core_worker
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler, ray_library.CoreWorker = set_handler, core_worker


def _kill_processes(directory: str) -> None:
    """Kill the processes that outlived a session, such as agents, found by their command lines.

    Args:
        directory: the session's directory, whose unique name is in the command lines.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if directory.encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


class FastPickle:
    """Wrapper that is pickled by Python's fast pickler; unpickling returns the wrapped value.

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
    """Return the value of a pickle that `FastPickle` made.

    Args:
        content: the pickle.
        beside: the buffers of large arrays, which are stored outside of `content`.
    """
    return pickle.loads(content, buffers=beside)


_MIN_OUT_OF_BAND_BYTES = 1 << 15  # a separate buffer costs as much as a few copies of this size
