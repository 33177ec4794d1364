"""Files of runs: JSON, YAML, lines of JSON, arrays, and the lock of a run directory.

A file is replaced as a whole, and is on disk when `replace_file` returns. A sealed file holds a
digest of its own content, so that a change of the file is noticed.

The format of most files has a schema number. Any change of a file's keys, words or meaning, or of
how its figures are computed, raises the number. A version of fedsim reads only the schema numbers
that it writes. A run directory, the state of a node and a checkpoint also name their version of
fedsim. Only this version can resume them, since another one may draw or charge differently.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

import fedsim
from fedsim.core.durable import append, digest_of, name_file, replace_file, try_lock
from fedsim.core.errors import ExitCode, InputError
from fedsim.core.settings import first_mistake
from fedsim.core.text_formats import parse_json, parse_plain_yaml

_Model = TypeVar("_Model", bound=BaseModel)

_DIGEST = "digest"  # key of a sealed file


class RunDirectoryError(InputError):
    """Error of a directory that cannot hold a run, or that holds no run."""


class DamagedRunError(RunDirectoryError):
    """Error of a run whose files are damaged, missing or contradictory; nothing was changed."""

    exit_code = ExitCode.FAILED

    @classmethod
    def of(cls, path: Path, problem: str) -> "DamagedRunError":
        """Return the error for a problem with a file; the message names the fix."""
        return cls(
            f"{path}: {problem}; nothing was changed: restore the run directory from a copy, or "
            "start a new run in another --out"
        )


def read_bytes(path: Path) -> bytes:
    """Return the content of a file that every run has, or raise a DamagedRunError without it."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedRunError.of(path, "the file is missing") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object, or the mapping in a .yaml file; others raise a DamagedRunError."""
    parse, kind = parse_json, "a JSON object"
    if path.suffix == ".yaml":
        parse, kind = parse_plain_yaml, "a mapping"
    try:
        content = parse(read_bytes(path).decode())
    except ValueError as error:
        raise DamagedRunError.of(path, f"the file is damaged: {error}") from error
    if not isinstance(content, dict):
        raise DamagedRunError.of(path, f"the file is damaged: not {kind}")
    return content


def find_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty object if the file is missing or damaged."""
    try:
        return read_object(path)
    except (DamagedRunError, OSError):
        return {}


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record as JSON, together with the record's digest."""
    sealed = {**content, _DIGEST: digest_of(content)}
    replace_file(path, (json.dumps(sealed, indent=2, allow_nan=False) + "\n").encode())


def read_sealed(path: Path, model: type[_Model]) -> _Model:
    """Return the record that `write_sealed` wrote, or raise a DamagedRunError for any other."""
    content = read_object(path)
    if content.pop(_DIGEST, None) != digest_of(content):
        raise DamagedRunError.of(path, "the file is damaged: it differs from the digest in it")
    return _checked(path, model, content, "the file")


def _checked(path: Path, model: type[_Model], content: object, where: str) -> _Model:
    """Return parsed content as an object of a pydantic class; `where` names it in the message."""
    if not isinstance(content, dict):
        raise DamagedRunError.of(path, f"{where} is damaged: not a JSON object")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise DamagedRunError.of(path, f"{where} is damaged: {first_mistake(error)}") from error


def alike(first: Any, second: Any, *, relative: float, absolute: float = 0.0) -> bool:
    """Whether two JSON values are equal, up to rounding of their floating-point numbers.

    Two floats count as equal if one of the differences `relative` and `absolute` is not exceeded.
    """
    same = partial(alike, relative=relative, absolute=absolute)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=relative, abs_tol=absolute)
    return type(first) is type(second) and first == second


class LinesFile:
    """Writer that appends lines to a file of JSON lines, and keeps a digest of all lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 of all lines, in hex."""
        return self._hash.hexdigest()

    def append(self, line: str) -> None:
        """Append a line, which is on disk on return, or raise an OSError that names the file."""
        data = f"{line}\n".encode()
        with name_file(self._path), self._path.open("ab") as file:
            append(file, data)
        self._hash.update(data)

    def cut(self, count: int) -> None:
        """Cut the file after its first `count` lines; a half-written last line is cut off, too."""
        kept = first_lines(self._path, count)
        replace_file(self._path, kept)
        self._hash = hashlib.sha256(kept)


def first_lines(path: Path, count: int) -> bytes:
    """Return the first `count` lines of a file, as bytes."""
    *lines, _unfinished = read_bytes(path).split(b"\n")
    return b"".join(line + b"\n" for line in lines[:count])


def read_lines(path: Path, model: type[_Model]) -> Iterator[tuple[_Model, Any]]:
    """Yield for each line of a JSON lines file the pair (checked record, parsed JSON).

    A last line that a crash cut short is skipped. A missing file, and a line that does not fit
    `model`, raise a DamagedRunError.
    """
    *lines, _unfinished = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        where = f"line {number}"
        try:
            content = parse_json(line.decode())
        except ValueError as error:
            raise DamagedRunError.of(path, f"{where} is damaged: {error}") from error
        yield _checked(path, model, content, where), content


def arrays_bytes(arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """Return the content of a safetensors file with arrays, and with metadata in its header."""
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata)


def read_arrays(path: Path, name: str = "the file") -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays in a safetensors file by name, and its metadata.

    Raises:
        DamagedRunError: the file is missing or damaged; the message calls it `name`.
    """
    data = read_bytes(path)
    try:
        arrays = load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return arrays, header.get("__metadata__", {})
    except (KeyError, SafetensorError, TypeError, ValueError) as error:
        raise DamagedRunError.of(path, f"{name} is damaged: {error}") from error


SCHEMAS: Mapping[str, int] = {
    "environment.json": 7,  # of the whole run directory
    "model.safetensors": 4,  # of the checkpoint, in its metadata
    "privacy.json": 3,
    "manifest.json": 1,
    "scores.json": 1,
    "answers.json": 1,
    "personalization.json": 1,
    "client_data.json": 1,
    "client_metrics.json": 1,
    "comparison.json": 1,
    "comparison_run.json": 1,
    "search.jsonl": 1,  # in each record of a draw
    "selection.json": 1,  # of the folder of a selected model
    "experiment.json": 5,  # of the state of a node's client
}


class SchemaError(InputError):
    """Error of files that this version of fedsim cannot use; the message names the fix."""


def check_schema(path: Path, content: Mapping[str, Any]) -> None:
    """Check that a file has the schema number (version of its format) that this fedsim reads.

    Args:
        path: the file, whose name is one of `SCHEMAS`.
        content: content of the file: `schema` is its schema number, and `fedsim` the version that
            wrote it.

    Raises:
        SchemaError: the schema number differs or is missing.
    """
    recorded, schema = content.get("schema"), SCHEMAS[path.name]
    if type(recorded) is int and recorded == schema:
        return
    writer = f" of fedsim {content['fedsim']!s:.40}" if "fedsim" in content else ""
    stated = "no schema" if recorded is None else f"schema {recorded!r:.40}"
    raise SchemaError(
        f"{path}{writer} has {stated}, and fedsim {fedsim.__version__} reads schema {schema}: run "
        "again with this version, or install the version that wrote the file"
    )


def check_version(path: Path, version: str, way_out: str) -> None:
    """Raise a SchemaError if another version of fedsim wrote the run or node in a directory.

    The message ends with `way_out`, in which `{version}` is replaced by `version`.
    """
    if version != fedsim.__version__:
        raise SchemaError(
            f"{path} was written by fedsim {version}; this is fedsim {fedsim.__version__}: "
            + way_out.format(version=version)
        )


LOCK = "checkpoint/lock"


class RunInUseError(RunDirectoryError):
    """Error of a run directory that another process writes; the message names that process."""

    exit_code = ExitCode.FAILED


class RunLock:
    """The lock of a run directory, held until `close`.

    Guarantee: between construction and `close` no other process of this machine holds the lock.

    Raises:
        RunInUseError: another process holds the lock.
        DamagedRunError: the directory has no `checkpoint`.
        OSError: the lock file cannot be created.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / LOCK
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            except (FileNotFoundError, NotADirectoryError):
                raise DamagedRunError.of(self._path.parent, "the directory is missing") from None
            if not try_lock(descriptor):
                os.close(descriptor)
                raise RunInUseError(_in_use(run))
            if _is_at(descriptor, self._path):
                break
            os.close(descriptor)  # its holder removed it between the two calls
        self._descriptor: int | None = descriptor
        started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        content = {"pid": os.getpid(), "host": platform.node(), "started": started}
        with name_file(self._path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{json.dumps(content)}\n".encode(), 0)

    def follow(self, run: Path) -> None:
        """Take over the new path `run` after the run directory was renamed."""
        self._path = run / LOCK

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock, and the lock file is still in the run directory."""
        return self._descriptor is not None and _is_at(self._descriptor, self._path)

    def close(self) -> None:
        """Remove the lock file and release the lock; a second call does nothing."""
        if self._descriptor is None:
            return
        if self.is_held:
            with suppress(OSError):  # a lock file without a holder is no obstacle
                self._path.unlink()
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)


def refuse_in_use(run: Path) -> None:
    """Raise a RunInUseError if a process writes a run directory; no file is created."""
    try:
        descriptor = os.open(run / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not try_lock(descriptor, shared=True):
            raise RunInUseError(_in_use(run))
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the file at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _in_use(run: Path) -> str:
    try:
        holder = parse_json((run / LOCK).read_text())
        who = "process {pid} on {host}, since {started}".format(**holder)
    except (OSError, ValueError, KeyError, TypeError):  # it is being written, or was just removed
        who = "another process"
    return (
        f"{run} is in use by {who}: one process writes a run directory; wait for it, or choose "
        "another --out"
    )
