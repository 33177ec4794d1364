"""Plug-ins of an experiment file: `package.module:callable` or `./file.py:callable`.

A file is executed once for each content. Its module name is a digest of its path and its bytes. An
edited file is therefore a new module, and objects of an older version keep their module.
`sys.modules` is the only registry.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.core.errors import InputError

_FORMS = "package.module:callable or ./file.py:callable"


class PluginError(InputError):
    """A plug-in that an experiment names cannot be found or loaded."""


def resolve(reference: str, *, base: Path, what: str) -> Callable[..., Any]:
    """Return the callable of a reference.

    Args:
        reference: `package.module:callable`, or `file.py:callable` with the file's path relative
            to `base` (or absolute). The callable may be an attribute of a class, `Class.method`.
        base: the directory of the experiment file.
        what: the setting that holds the reference (`model.name`); starts every message.

    Raises:
        PluginError: with one line that says what is wrong and how to fix it.
    """
    where = f"{what} {reference!r}"
    location, colon, attribute = reference.rpartition(":")
    if not (colon and location and attribute):
        raise PluginError(f"{where}: not a reference; write {_FORMS}")
    if location.endswith(".py"):
        module = _load_file(base / Path(location).expanduser(), where)
    else:
        module = _import(location, where)
    found = _attribute(module, attribute, where)
    if not callable(found):
        raise PluginError(
            f"{where}: {attribute} is not callable, it is a {type(found).__name__}; "
            "name a function or a class"
        )
    return found


def plugin_source(reference: str, *, base: Path) -> bytes:
    """Return the source file that a reference names; nothing for a built-in name.

    Args:
        reference: a built-in name, or as in `resolve`.
        base: the directory of the experiment file.
    """
    location = reference.rpartition(":")[0]
    if location.endswith(".py"):
        return (base / Path(location).expanduser()).read_bytes()
    file = getattr(sys.modules.get(location), "__file__", None)
    return b"" if file is None else Path(file).read_bytes()


def describe_error(error: BaseException, *, file: str | None = None) -> str:
    """Return an exception on one line: its type, its message and where it was raised.

    Args:
        error: the exception.
        file: the plug-in's source file; the message names its deepest line in the traceback, not a
            line of a library that it called. None: no line is named.
    """
    message = " ".join(str(error).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, SyntaxError):  # its message names the line: "... (file.py, line 3)"
        return text
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return (
        f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
    )


def source_file(function: Callable[..., Any]) -> str | None:
    """Return the file of the module that defines a plug-in, for `describe_error`."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return getattr(module, "__file__", None)


def _import(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only if the missing module is the named one or a package above it; else the named module
        # exists and lacks a dependency.
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise PluginError(
                f"{where}: no module named {error.name!r}; install it, add its directory to "
                "PYTHONPATH, or write ./file.py:callable"
            ) from error
        raise _import_failure(error, where, _deepest_file(error)) from error
    except (Exception, SystemExit) as error:
        raise _import_failure(error, where, _deepest_file(error)) from error


def _load_file(path: Path, where: str) -> ModuleType:
    path = path.resolve()
    try:
        source = path.read_bytes()
    except FileNotFoundError as error:
        raise PluginError(
            f"{where}: no such file: {path}; the path is relative to the experiment file"
        ) from error
    except OSError as error:
        raise PluginError(f"{where}: cannot read {path}: {error.strerror}") from error
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()[:16]
    name = f"fedsim_plugin_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise PluginError(f"{where}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not spec.loader.exec_module: its bytecode cache compares time and size, so a file edited
        # twice within a second could run in its old version.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failure(error, where, str(path)) from error
    return module


def _import_failure(error: BaseException, where: str, file: str | None) -> PluginError:
    return PluginError(
        f"{where}: importing it failed with {describe_error(error, file=file)}; "
        "the file must import without errors"
    )


def _deepest_file(error: BaseException) -> str | None:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    imported = [f for f in files if f != __file__ and not f.startswith("<frozen")]
    return imported[-1] if imported else None


def _attribute(module: ModuleType, path: str, where: str) -> object:
    found: object = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            close = get_close_matches(name, dir(found), n=1)
            hint = f"did you mean {close[0]}?" if close else "check the name after the colon"
            owner = getattr(module, "__file__", None) or module.__name__
            raise PluginError(f"{where}: {owner} has no {name!r}; {hint}") from error
    return found
