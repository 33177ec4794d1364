"""Plug-ins of an experiment file: `package.module:callable` or `./file.py:callable`.

Modules of the experiment's directory are loaded by `plugin_package`, once for each content: an
edited file, and all modules beside it, are loaded anew. Other modules are imported as usual, and
one that is edited after its import is refused.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.core.plugin_errors import PluginError as PluginError
from fedsim.core.plugin_errors import describe_error as describe_error
from fedsim.core.plugin_errors import plugin_calls as plugin_calls
from fedsim.core.plugin_package import PluginPackage
from fedsim.core.plugin_sources import SourceFile, plugin_directory, trace_plugin
from fedsim.core.torch_functions import original_functions

_FORMS = "package.module:callable or ./file.py:callable"


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
    module = _load(reference, base, where)
    with plugin_calls(f"{where}: reading it failed"):
        found = _attribute(module, attribute, where)
    if not callable(found):
        raise PluginError(
            f"{where}: {attribute} is not callable, it is a {type(found).__name__}; "
            "name a function or a class"
        )
    return found


def _load(reference: str, base: Path, where: str) -> ModuleType:
    """Return the module of a reference, with the code of its files as they are now."""
    original_functions()
    try:
        trace, entry = trace_plugin(reference, base=base)
    except FileNotFoundError as error:
        raise PluginError(
            f"{where}: no such file: {error.filename}; the path is relative to the experiment file"
        ) from error
    except OSError as error:
        raise PluginError(f"{where}: cannot read {error.filename}: {error.strerror}") from error
    location, directory = reference.rpartition(":")[0], plugin_directory(reference, base=base)
    here = [file for file in trace.files.values() if file.directory == directory]
    try:
        if here:
            name = entry.name if entry else location
            module = PluginPackage.of(directory, name, here).load(name)
        else:
            module = importlib.import_module(location)
    except ModuleNotFoundError as error:
        # Only if the missing module is the named one or a package above it; else the named module
        # exists and lacks a dependency.
        if error.name and (location == error.name or location.startswith(f"{error.name}.")):
            raise PluginError(
                f"{where}: no module named {error.name!r}; install it, add its directory to "
                "PYTHONPATH, or write ./file.py:callable"
            ) from error
        raise _import_failure(error, where) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _import_failure(error, where) from error
    _refuse_edited(trace.files.values(), directory, where)
    return module


def _refuse_edited(files: Iterable[SourceFile], directory: Path, where: str) -> None:
    """Refuse modules outside of `directory` that were edited after their import.

    Their first digest is kept in the module. An edit between the import and that is not seen.
    """
    for file in files:
        module = sys.modules.get(file.name)
        if file.directory == directory or getattr(module, "__file__", None) != str(file.path):
            continue
        if vars(module).setdefault("__fedsim_digest__", file.digest) != file.digest:
            raise PluginError(
                f"{where}: {file.path} was edited after this process imported it; restart the "
                "process, or put the file into the experiment's directory"
            )


def _import_failure(error: BaseException, where: str) -> PluginError:
    return PluginError(
        f"{where}: importing it failed with {describe_error(error)}; "
        "the file must import without errors"
    )


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
