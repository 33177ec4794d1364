"""Loading of an experiment file's plug-ins: `package.module:callable` or `./file.py:callable`.

Modules of the experiment's directory are loaded into a separate package. If one of their files is
edited, all modules of the directory are loaded again, into a new package; objects from the old
package keep working. Other modules are imported as usual, and a module that is edited after its
import is refused.

A plug-in's imports from its directory do not use `sys.path`. The imported modules are made from the
source files that `plugin_sources` read, under separate module names. So the code that runs is the
code whose digest is recorded. The standard library and fedsim take precedence over files of the
directory; installed packages do not.
"""

import builtins
import hashlib
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import spec_from_file_location
from itertools import count, takewhile
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, Self

from fedsim.core.names import closest_hint
from fedsim.core.plugin_errors import PluginError as PluginError
from fedsim.core.plugin_errors import describe_error as describe_error
from fedsim.core.plugin_errors import original_functions
from fedsim.core.plugin_errors import plugin_calls as plugin_calls
from fedsim.core.plugin_sources import (
    SourceFile,
    find_file,
    is_foreign,
    plugin_directory,
    trace_plugin,
)
from fedsim.core.python_objects import PythonObject, file_instead, is_object_name

_import = builtins.__import__


class PluginPackage(ModuleType):
    """The package that holds the plug-in modules of one directory; it exists in `sys.modules` only.

    Args:
        name: the package's name in `sys.modules`.
        directory: the directory of the modules.
    """

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, doc=f"Plug-in modules of {directory}.")
        self.__path__ = []  # no other import may find files there
        self._directory = directory
        self._files: dict[str, SourceFile] = {}
        self._read: dict[str, frozenset[str]] = {}
        self._lock = RLock()

    @classmethod
    def of(cls, directory: Path, plugin: str, files: Iterable[SourceFile]) -> Self:
        """Return a directory's package, after adding the files of a plug-in.

        If a file was edited, or the plug-in now imports other files, the result is a new package.

        Args:
            directory: the directory, as an absolute path without symbolic links.
            plugin: name of the plug-in's module.
            files: files of the directory that the plug-in imports, with their current content.
        """
        new = {file.name: file for file in files}
        prefix = f"fedsim_plugin_{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}_"
        names = takewhile(sys.modules.__contains__, (f"{prefix}{n}" for n in count()))
        loaded = list(names)
        package = sys.modules[loaded[-1]] if loaded else None
        if not isinstance(package, cls) or package._is_outdated(plugin, new):
            package = cls(f"{prefix}{len(loaded)}", directory)
            sys.modules[package.__name__] = package
        package._files.update(new)
        package._read[plugin] = frozenset(new)
        return package

    def load(self, name: str) -> ModuleType:
        """Return a module of the directory; the first load executes the module.

        Args:
            name: dotted module name, relative to the directory.

        Raises:
            ModuleNotFoundError: no file of the directory has this name.
            BaseException: any error that the module raises when it is executed.
        """
        with self._lock:
            above, _, last = name.rpartition(".")
            parent = self.load(above) if above else self
            full = f"{self.__name__}.{name}"
            if full not in sys.modules:
                self._execute(name, full)
                setattr(parent, last, sys.modules[full])
            return sys.modules[full]

    def _execute(self, name: str, full: str) -> None:
        file = self._files.get(name)
        if file is None and not self._has(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = ModuleType(full)
        is_package = file is None or file.is_package
        module.__package__ = full if is_package else full.rpartition(".")[0]
        if is_package:
            module.__path__ = []
        sys.modules[full] = module
        if file is None:  # a directory without __init__.py
            return
        module.__file__ = str(file.path)
        inside = [] if is_package else None
        module.__spec__ = spec_from_file_location(
            full, file.path, submodule_search_locations=inside
        )
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import_module}
        try:
            exec(compile(file.content, str(file.path), "exec"), module.__dict__)
        except BaseException:
            del sys.modules[full]
            raise

    def _import_module(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Run an import statement of a plug-in; the arguments are those of `__import__`."""
        top = name.partition(".")[0]
        if level == 0 and not self._is_local(top):
            return _import(name, globals, locals, fromlist or (), level)
        above = self._above(globals or {}, level) if level else ""
        absolute = ".".join(part for part in (above, name) if part)
        module = self.load(absolute) if absolute else self
        if not fromlist:
            return self.load(absolute.partition(".")[0])
        wanted = getattr(module, "__all__", ()) if "*" in fromlist else fromlist
        for item in wanted:
            inner = f"{absolute}.{item}" if absolute else item
            if not hasattr(module, item) and self._has(inner):
                self.load(inner)
        return module

    def _above(self, globals: Mapping[str, Any], level: int) -> str:
        package = str(globals.get("__package__", "")).removeprefix(self.__name__)
        parts = [part for part in package.split(".") if part]
        if level - 1 > len(parts):
            raise ImportError("attempted relative import beyond the plug-in's directory")
        return ".".join(parts[: len(parts) + 1 - level])

    def _is_local(self, top: str) -> bool:
        """Whether a top-level module is in the directory.

        Raises:
            ImportError: it is in the directory, but no import statement names it, so its digest is
                unknown.
        """
        if is_foreign(top) or self._has(top):
            return not is_foreign(top)
        if find_file(self._directory, top) is not None:
            raise ImportError(
                f"{top} is in {self._directory}, but no import statement of the plug-in names it: "
                "write `import`, so that fedsim knows the plug-in's sources",
                name=top,
            )
        return False

    def _has(self, name: str) -> bool:
        return name in self._files or any(
            file_name.startswith(f"{name}.") for file_name in self._files
        )

    def _is_outdated(self, plugin: str, new: Mapping[str, SourceFile]) -> bool:
        """Whether a file changed since it was read, or the plug-in now imports other files."""
        if self._read.get(plugin, frozenset(new)) != frozenset(new):
            return True
        return any(
            file.content != (new[name].content if name in new else _content(file.path))
            or file.path != (new[name].path if name in new else file.path)
            for name, file in self._files.items()
        )


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


_FORMS = "package.module:callable or ./file.py:callable"


def unknown_plugin(
    setting: str, kind: str, name: str, known: Collection[str], own: str = _FORMS
) -> str:
    """Return the message for a name that is neither built in nor a reference.

    Args:
        setting: name of the setting, such as `model.name`.
        kind: noun for what it names, such as `model`.
        name: the unknown name.
        known: the built-in names.
        own: the ways to name something of the user's own.
    """
    hint = closest_hint(name, known, f"built in: {', '.join(known)}", quotes=False)
    return f"{setting}: no {kind} named {name!r}; {hint} (your own: {own})"


def resolve(reference: str, *, base: Path, setting: str) -> Callable[..., Any]:
    """Return the function or class that a plug-in reference names.

    Args:
        reference: `package.module:callable`, or `file.py:callable` with the file's path relative
            to `base` (or absolute). The callable may be an attribute of a class, `Class.method`.
        base: the directory of the experiment file.
        setting: name of the setting with the reference (`model.name`), with which messages start.

    Raises:
        PluginError: the reference cannot be resolved; one line says why and how to fix it.
    """
    where = f"{setting} {reference!r}"
    if isinstance(reference, PythonObject):
        original_functions()
        return _callable(reference.value, reference.name, where)
    if is_object_name(reference):
        raise PluginError(
            f"{where}: this is a Python object, which only the program that gave it has; run the "
            f"experiment there, or {file_instead(reference)}"
        )
    location, colon, attribute = reference.rpartition(":")
    if not (colon and location and attribute):
        raise PluginError(f"{where}: not a reference; write {_FORMS}")
    module = _load(reference, base, where)
    with plugin_calls(f"{where}: reading it failed"):
        value = _attribute(module, attribute, where)
    return _callable(value, attribute, where)


def _callable(value: object, name: str, where: str) -> Callable[..., Any]:
    if not callable(value):
        raise PluginError(
            f"{where}: {name} is not callable, it is a {type(value).__name__}; "
            "name a function or a class"
        )
    return value


def _load(reference: str, base: Path, where: str) -> ModuleType:
    """Return the module of a reference, with the current content of its files."""
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
        # Only if the missing module is the named module or its parent package; otherwise the named
        # module exists and lacks a dependency.
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

    The digest at the first check is kept in the module. An edit between the import and the first
    check is not seen.
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
    value: object = module
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            known, otherwise = dir(value), "check the name after the colon"
            hint = closest_hint(name, known, otherwise, quotes=False)
            owner = getattr(module, "__file__", None) or module.__name__
            raise PluginError(f"{where}: {owner} has no {name!r}; {hint}") from error
    return value
