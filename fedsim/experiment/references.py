"""Checks of built-in names, plug-ins and files that an experiment names; nothing is imported."""

import os
from collections.abc import Collection
from pathlib import Path

from fedsim.experiment.errors import any_of, did_you_mean, shorten

DATA_SUFFIXES = (".npz", ".csv", ".parquet")


def check_name(name: str, kind: str, builtin: Collection[str], base: Path) -> str | None:
    """Return the mistake in a built-in name or a plug-in, or None.

    Args:
        name: `digits`, `package.module:function` or `./file.py:function`.
        kind: "dataset", "model" or "loss", for the message.
        builtin: the built-in names.
        base: the directory in which relative paths start.
    """
    if name in builtin:
        return None
    if ":" in name:
        return _check_plugin(name, base)
    shown = shorten(repr(name))
    if name.endswith(".py"):
        return f"unknown {kind} {shown}; to use a function of the file write ./file.py:function"
    if kind == "dataset" and name.endswith(DATA_SUFFIXES):
        return f"unknown dataset {shown}; to use a file write {{path: FILE, target: NAME}}"
    ways = "a plug-in is package.module:function or ./file.py:function"
    fix = did_you_mean(name, builtin) or f"; built in: {any_of(sorted(builtin))}; {ways}"
    return f"unknown {kind} {shown}{fix}"


def check_data_file(path: str, base: Path) -> str | None:
    """Return the mistake in the path of a data file, or None."""
    if not path.lower().endswith(DATA_SUFFIXES):
        return f"must end in {any_of(DATA_SUFFIXES)}, got {shorten(repr(path))}"
    return _check_exists(path, base)


def check_table_file(path: str, base: Path) -> str | None:
    """Return the mistake in the path of a table of examples, or None."""
    if not path.lower().endswith(DATA_SUFFIXES[1:]):
        return f"must end in {any_of(DATA_SUFFIXES[1:])}, got {shorten(repr(path))}"
    return _check_exists(path, base)


def check_folder(path: str, base: Path) -> str | None:
    """Return the mistake in the path of a folder of data files, or None."""
    full = _absolute(path, base)
    if os.path.isfile(full):
        return f"must be the folder with the files, got the file {full!r}"
    return None if os.path.isdir(full) else f"no such folder: {full!r}"


def check_table(path: str, base: Path) -> str | None:
    """Return the mistake in the path of a csv file, or None."""
    if not path.lower().endswith(".csv"):
        return f"must end in '.csv', got {shorten(repr(path))}"
    return _check_exists(path, base)


def check_weights(path: str, base: Path) -> str | None:
    """Return the mistake in the path of a file of weights, or None."""
    if not path.lower().endswith(".safetensors"):
        return f"must end in '.safetensors', got {shorten(repr(path))}"
    return _check_exists(path, base)


def _check_plugin(name: str, base: Path) -> str | None:
    """Return the mistake in a plug-in that shows without importing it, or None."""
    where, _, function = name.rpartition(":")
    shown = shorten(repr(name))
    form = f"must be package.module:function or ./file.py:function, got {shown}"
    if not _is_dotted_name(function):
        return form
    if where.endswith(".py"):
        return _check_exists(where, base)
    if where.startswith((".", "/", "~")):
        return f"a plug-in file must end in '.py', got {shown}"
    return None if _is_dotted_name(where) else form


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _check_exists(path: str, base: Path) -> str | None:
    full = _absolute(path, base)
    return None if os.path.isfile(full) else f"no such file: {full!r}"


def _absolute(path: str, base: Path) -> str:
    # os.path.isfile returns False for a path with a NUL or a name that is too long; pathlib raises.
    if "\0" not in path:
        path = os.path.expanduser(path)
    return os.path.abspath(os.path.join(base, path))
