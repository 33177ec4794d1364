"""Protection against errors of plug-ins: exceptions, exits, and replaced functions of torch.

A plug-in may raise anything: `SystemExit`, `GeneratorExit`, or an exception whose text raises or
has a million characters. So every call of a plug-in is inside `plugin_calls`, which raises one
error with a message for people. Code that handles every `Exception` uses `contained_exits` instead.
A `KeyboardInterrupt` passes unchanged: it comes from the user.

`os._exit` raises no exception by itself, but inside `contained_os_exit` it does. A plug-in that
ends the process in another way (a signal, `os.exec`, C) cannot be caught.

A plug-in that replaces a torch function with which noise and clipping are computed, such as
`torch.linalg.vector_norm`, changes the mechanism of every client: the clipping may be wrong.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any, NoReturn

from fedsim.core.errors import FedsimError, InputError

_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_IN_PYTHON = ("torch._tensor", "torch.functional")


@cache
def original_functions() -> dict[str, object]:
    """Return the functions of torch by name, as they were at the first call of this function.

    The first call must come before any plug-in is loaded.
    """
    return dict(_functions())


def replaced_functions() -> list[str]:
    """Return the names of the torch functions that a plug-in replaced."""
    if "torch" not in sys.modules:
        return []
    now = dict(_all())
    return [name for name, value in original_functions().items() if now.get(name) != value]


def _functions() -> Iterator[tuple[str, object]]:
    for name, value in _all():
        is_python = isinstance(value, FunctionType) and value.__module__ in _IN_PYTHON
        if is_python or isinstance(value, _IN_C):
            yield name, value


def _all() -> Iterator[tuple[str, object]]:
    import torch

    for owner in (torch, torch.linalg, torch.Tensor):
        prefix = "torch" if owner is torch else f"torch.{owner.__name__.rpartition('.')[2]}"
        attributes = dict.fromkeys([*vars(owner), *(dir(owner) if isinstance(owner, type) else ())])
        yield from ((f"{prefix}.{name}", getattr(owner, name)) for name in attributes)


MAX_ERROR_CHARS = 500
"""Most characters that a message shows of a plug-in's or library's error text."""

# A mistake is at the deepest line outside of fedsim, its libraries and the standard library.
_LIBRARIES = {"fedsim", "torch", "numpy", "scipy", "sklearn", "pyarrow", "flwr", "ray", "click"}
_NO_PLACES = frozenset(_LIBRARIES) | sys.stdlib_module_names


class PluginError(InputError):
    """Raised if a plug-in of an experiment cannot be found or loaded, or if a call of it fails."""


class PluginExitError(Exception):
    """Raised if a plug-in tries to end the program; the message has no text from the plug-in."""


class plugin_calls:
    """Context manager that turns each error of a plug-in into a `FedsimError` with file and line.

    Each `FedsimError` of fedsim itself passes unchanged, as its message is written for people.

    Args:
        action: start of the message, which names the failed action, such as
            `model.name './net.py:build': failed`.
        raises: class of the raised error.
        fix: end of the message, which says how to fix the error.
        mixed: whether the block also runs much code of fedsim. If so, an error is only converted if
            its traceback has a line of a plug-in, or if the error would end the program.
    """

    def __init__(
        self,
        action: str,
        *,
        raises: type[FedsimError] = PluginError,
        fix: str | None = None,
        mixed: bool = False,
    ) -> None:
        self._action, self._raises, self._mixed = action, raises, mixed
        self._fix = "" if fix is None else f"; {fix}"

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise a `FedsimError` in place of the plug-in's error.

        Raises:
            FedsimError: a plug-in raised an error; the class is `raises`.
            PluginError: the block failed and a plug-in replaced functions of torch.
        """
        if kind is None or error is None or issubclass(kind, KeyboardInterrupt):
            return
        refuse_replaced_functions()
        is_ours = issubclass(kind, FedsimError) and _module_of(kind).startswith("fedsim.")
        is_elsewhere = self._mixed and issubclass(kind, Exception) and plugin_place(trace) is None
        if is_ours or is_elsewhere:
            return
        raise self._raises(f"{self._action} with {describe_error(error)}{self._fix}") from error


def refuse_replaced_functions() -> None:
    """Check that no plug-in replaced a function of torch.

    Raises:
        PluginError: a function was replaced; the message names it.
    """
    if names := replaced_functions():
        raise PluginError(
            f"a plug-in replaced {names[0]}, and noise and clipping are computed with torch's own "
            "functions; give your function another name, and call that"
        )


@contextmanager
def contained_os_exit() -> Iterator[None]:
    """Make `os._exit` raise `SystemExit` in this process; forked child processes still end."""
    leave, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


class contained_exits:
    """Context manager that turns exceptions which would end the program into `PluginExitError`."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise `PluginExitError` in place of an exception that would end the program.

        Raises:
            PluginExitError: the block raised `SystemExit`, `GeneratorExit` or the like.
        """
        if kind is None or issubclass(kind, (Exception, KeyboardInterrupt)):
            return
        place = plugin_place(trace)
        where = "" if place is None else f" at {place[0]}:{place[1]}"
        raise PluginExitError(
            f"{_name_of(kind)}{where}: a plug-in must not end the program"
        ) from error


def describe_error(error: BaseException) -> str:
    """Return one short line about an exception: its type, message, file and line.

    File and line are those of the deepest frame that belongs neither to fedsim nor to a library. A
    message that cannot be shown is left out, and a long message is cut.
    """
    message = error_text(error)
    name = type_name(error)
    text = f"{name}: {message}" if message else name
    place = None if isinstance(error, SyntaxError) else plugin_place(_traceback_of(error))
    return text if place is None else f"{text} ({place[0]}, line {place[1]})"


def error_text(error: BaseException) -> str:
    """Return the text of an exception on one line, at most `MAX_ERROR_CHARS` characters."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  a `__str__` of a plug-in may raise anything
        return "its text cannot be shown"
    return _text_of(text)


def _text_of(value: Any) -> str:
    """Return a text as one printable line, without calling methods of a subclass of str."""
    if not isinstance(value, str):
        return ""
    start = str.__getitem__(value, slice(4 * MAX_ERROR_CHARS))
    line = " ".join(str.split(start))
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[:MAX_ERROR_CHARS]}..."


def type_name(error: BaseException) -> str:
    """Return the name of an exception's class, at most `MAX_ERROR_CHARS` characters."""
    return _name_of(type(error))


def _name_of(kind: type[BaseException]) -> str:
    return _text_of(type.__dict__["__name__"].__get__(kind))


def _module_of(kind: type[BaseException]) -> str:
    return _text_of(type.__dict__["__module__"].__get__(kind))


def _traceback_of(error: BaseException) -> TracebackType | None:
    return BaseException.__dict__["__traceback__"].__get__(error)


def plugin_place(trace: TracebackType | None) -> tuple[str, int] | None:
    """Return file name and line of the deepest plug-in frame of a traceback; None if it has none.

    A frame that belongs neither to fedsim nor to a library is a plug-in frame.
    """
    place = None
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__")
        if isinstance(module, str) and module.partition(".")[0] not in _NO_PLACES:
            place = _text_of(Path(trace.tb_frame.f_code.co_filename).name), trace.tb_lineno
        trace = trace.tb_next
    return place
