"""Recording of the source files of plug-ins and of all modules that they import.

The files are found by reading import statements, also those inside functions. So the result depends
on files alone, not on the modules that the process has imported, and is the same on every engine
and node.

| what a plug-in imports                         | what is recorded of it                       |
|------------------------------------------------|----------------------------------------------|
| a module of the experiment's directory         | its content, and that of its own imports     |
| a module elsewhere that is not installed       | the same                                     |
| an installed package                           | the version of its distribution              |
| the standard library                           | the version of Python                        |
| fedsim, torch, numpy                           | nothing: a run records their versions anyway |
| by a computed name; a compiled extension       | nothing                                      |
| a file that it opens                           | nothing; the examples have their own digest  |

A plug-in that is a Python object has no file: `fedsim.core.python_objects` reads its code.
"""

import ast
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions, version
from pathlib import Path

from fedsim.core.plugin_errors import PluginError
from fedsim.core.python_objects import PythonObject, is_object_name

_CONDITIONS = {"fedsim", "torch", "numpy"}  # their versions are conditions of every run
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class SourceFile:
    """A Python source file with the content that was read.

    Attributes:
        directory: the directory in which the file's absolute imports are looked up.
        path: the path of the file.
        name: the file's dotted module name below `directory`.
        content: the bytes of the file.
    """

    directory: Path
    path: Path
    name: str
    content: bytes

    @property
    def is_package(self) -> bool:
        """Whether the file is the `__init__.py` of a package."""
        return self.path.name == "__init__.py" and self.name != "__init__"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file's content, in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def place(self) -> str:
        """Path of the file relative to `directory`, with slashes; the same on every machine."""
        return self.path.relative_to(self.directory).as_posix()


@dataclass(frozen=True)
class PluginSources:
    """The digests of all source files and the package versions that an experiment's plug-ins use.

    Attributes:
        files: SHA-256 of each source file, by the file's path relative to its directory.
        packages: version of each imported distribution by name, and of Python if there is a
            plug-in.
    """

    files: Mapping[str, str]
    packages: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 over `files` and `packages`, in hexadecimal."""
        content = [dict(self.files), dict(self.packages)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def entries(self) -> dict[str, str]:
        """All digests and versions, by the names that error messages use for them."""
        files = {
            f"{'Python object' if is_object_name(place) else 'plug-in file'} {place}": digest
            for place, digest in self.files.items()
        }
        return files | {f"plug-in's package {name}": v for name, v in self.packages.items()}

    def refuse_edited(self, now: "PluginSources") -> None:
        """Check that the sources have not changed since they were recorded here.

        Raises:
            PluginError: a file or an installed package of a plug-in has changed.
        """
        before, after = self.entries, now.entries
        for name in [*before, *(name for name in after if name not in before)]:
            if before.get(name) != after.get(name):
                raise PluginError(
                    f"the {name} changed while the experiment was loaded or ran: restore it to go "
                    "on, or start a new run"
                )


@dataclass
class Trace:
    """The set of files and installed modules that one plug-in imports, directly or indirectly.

    Attributes:
        files: the source files, keyed by (directory, module name).
        installed: top-level names of installed modules.
    """

    files: dict[tuple[Path, str], SourceFile] = field(default_factory=dict)
    installed: set[str] = field(default_factory=set)

    def follow(self, entry: SourceFile) -> None:
        """Add a file, its parent packages' files, and all modules that these files import."""
        self._follow_all([*_find_all(entry.directory, _parents(entry.name)), entry])

    def follow_name(self, name: str, directory: Path) -> SourceFile | None:
        """Add a module and all modules that it imports.

        Args:
            name: dotted name of the module.
            directory: the directory in which the module is looked up.

        Returns:
            The module's source file; None if the module is installed or missing.
        """
        files = self._find(name, directory)
        self._follow_all(files)
        return files[-1] if files and files[-1].name == name else None

    def _follow_all(self, files: Iterable[SourceFile]) -> None:
        waiting = list(files)
        while waiting:
            file = waiting.pop()
            if self.files.setdefault((file.directory, file.name), file) is not file:
                continue
            for name in _imports(file):
                waiting += self._find(name, file.directory)

    def _find(self, name: str, directory: Path) -> list[SourceFile]:
        """Return the files of a module and its parent packages; empty for an installed module."""
        top = name.partition(".")[0]
        if is_foreign(top):
            return []
        names = [*_parents(name), name]
        if files := _find_all(directory, names):
            return files
        elsewhere = _own_directory(top)
        if elsewhere is not None and (files := _find_all(elsewhere, names)):
            return files
        self.installed.add(top)
        return []


def read_sources(references: Iterable[str], *, base: Path) -> PluginSources:
    """Return digests and versions of everything that plug-ins import, without importing them.

    Args:
        references: plug-in references, as `fedsim.core.plugins.resolve` takes them; built-in names
            are ignored.
        base: the directory of the experiment file.

    Raises:
        PluginError: the file of a plug-in cannot be read.
    """
    named = [reference for reference in references if ":" in reference]
    digests: dict[str, set[str]] = {}
    installed: set[str] = set()
    for reference in named:
        try:
            if isinstance(reference, PythonObject):
                code, trace = reference.code(), Trace()
                if code.code:  # arrays have none
                    digests.setdefault(str.__str__(reference), set()).add(code.digest)
                for module in sorted(code.modules):
                    trace.follow_name(module, base.resolve())
            else:
                trace, _ = trace_plugin(reference, base=base)
        except OSError as error:
            raise PluginError(f"cannot read {error.filename}: {error.strerror}") from error
        installed |= trace.installed
        for file in trace.files.values():
            digests.setdefault(file.place, set()).add(file.digest)
    files = {place: " ".join(sorted(values)) for place, values in sorted(digests.items())}
    packages = {"Python": platform.python_version(), **_versions(installed)} if named else {}
    return PluginSources(files, packages)


def trace_plugin(reference: str, *, base: Path) -> tuple[Trace, SourceFile | None]:
    """Return the `Trace` of a plug-in's imports, and the plug-in's file (None if it is installed).

    Args:
        reference: the plug-in reference, as `fedsim.core.plugins.resolve` takes it.
        base: the directory of the experiment file.

    Raises:
        OSError: the file of the plug-in cannot be read.
    """
    trace, location = Trace(), reference.rpartition(":")[0]
    directory = plugin_directory(reference, base=base)
    if not location.endswith(".py"):
        return trace, trace.follow_name(location, directory)
    path = (base / os.path.expanduser(location)).resolve()
    entry = SourceFile(directory, path, _module_name(path, directory), path.read_bytes())
    trace.follow(entry)
    return trace, entry


def plugin_directory(reference: str, *, base: Path) -> Path:
    """Return the directory in which a plug-in's imports are looked up.

    This is the experiment file's directory, or the plug-in file's directory if the plug-in file is
    outside of the experiment file's directory.

    Args:
        reference: the plug-in reference, as `fedsim.core.plugins.resolve` takes it.
        base: the directory of the experiment file.
    """
    base, location = base.resolve(), reference.rpartition(":")[0]
    path = (base / os.path.expanduser(location)).resolve()
    outside = location.endswith(".py") and not path.is_relative_to(base)
    return path.parent if outside else base


def is_foreign(top: str) -> bool:
    """Whether a top-level module name always means the standard library, fedsim, torch or numpy."""
    return top in sys.stdlib_module_names or top in _CONDITIONS


def find_file(directory: Path, name: str) -> Path | None:
    """Return the file of a module or package below a directory; None if there is none.

    Args:
        directory: the directory in which the module is looked up.
        name: dotted name of the module.
    """
    inside = directory.joinpath(*name.split("."))
    for path in (inside / "__init__.py", inside.parent / f"{inside.name}.py"):
        if path.is_file():
            return path
    return None


def _find_all(directory: Path, names: Iterable[str]) -> list[SourceFile]:
    paths = ((name, find_file(directory, name)) for name in names)
    return [SourceFile(directory, path, name, path.read_bytes()) for name, path in paths if path]


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _module_name(path: Path, directory: Path) -> str:
    """Return the name by which other modules import a file; a digest if it has no such name."""
    place = path.relative_to(directory).with_suffix("")
    parts = place.parts[:-1] if place.name == "__init__" and len(place.parts) > 1 else place.parts
    if all(part.isidentifier() for part in parts):
        return ".".join(parts)
    return "file_" + hashlib.sha256(place.as_posix().encode()).hexdigest()[:16]


def _imports(file: SourceFile) -> Iterator[str]:
    """Yield the absolute names of all modules that a file's import statements may load."""
    try:
        tree = ast.parse(file.content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the error is reported when the file is loaded
    package = file.name.split(".") if file.is_package else file.name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = [*above, *(node.module.split(".") if node.module else [])]
            if module:
                yield ".".join(module)
            for alias in node.names:
                if alias.name != "*":
                    yield ".".join([*module, alias.name])
                else:
                    yield from _inside(file.directory, module)


def _inside(directory: Path, package: list[str]) -> Iterator[str]:
    """Yield the names of all modules of a package: `import *` may load any of them."""
    for path in sorted(directory.joinpath(*package).glob("*.py")):
        if path.stem.isidentifier() and path.stem != "__init__":
            yield ".".join([*package, path.stem])


def _own_directory(top: str) -> Path | None:
    """Return the directory on `sys.path` that holds a module that is not installed, or None."""
    try:
        spec = PathFinder.find_spec(top)
    except (ImportError, ValueError, OSError):
        return None
    if spec is None:
        return None
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    path = Path(places[0]).absolute()
    if path.name == "__init__.py":
        path = path.parent
    return None if _INSTALLED & set(path.parts) else path.parent.resolve()


def _versions(modules: Iterable[str]) -> dict[str, str]:
    """Return the version of each module's distribution; `not a distribution` if there is none."""
    if not (wanted := sorted(modules)):
        return {}
    places = tuple((path, os.stat(path).st_mtime_ns) for path in sys.path if os.path.isdir(path))
    known = _distributions(places)
    return {
        name: version(name) if top in known else "not a distribution"
        for top in wanted
        for name in known.get(top, [f"module {top}"])
    }


@lru_cache(maxsize=1)
def _distributions(_places: tuple[tuple[str, int], ...]) -> Mapping[str, list[str]]:
    """Return the distributions of each module, cached while no directory of `sys.path` changes."""
    return packages_distributions()
