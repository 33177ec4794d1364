"""What is on disk after a round: `releases.jsonl`, `rounds.jsonl`, then the checkpoint.

A line of `releases.jsonl` has the tags of every value that left a client; `fedsim verify RUN
--replay` computes them again. It is on disk before its round is in `rounds.jsonl`, so no finished
round is without it, and that is on disk before the checkpoint.

The checkpoint is the server's state, and what the other files held then: one safetensors file, so
that a crash leaves no mixture of two states. Its metadata hold a digest of everything in it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
from flwr.app import ArrayRecord
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedsim.algorithms.state import ServerState
from fedsim.core.durable import append
from fedsim.core.errors import name_file
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.runs.files import (
    SCHEMAS,
    DamagedRunError,
    check_schema,
    checked,
    read_bytes,
    write_bytes,
)
from fedsim.server.round_report import RoundReport, RoundRow

_MEMORY = "optimizer/"  # before the names of the algorithm's arrays
_CLIENT_MEMORY = "clients/"  # before those of its arrays of all clients
_AVERAGE = "average/"  # before those of the average of the global models
_VERSION = "version/"  # before the number and the names of an older global model
FILE = "model.safetensors"
_CONTENT, _DIGEST, _SCHEMA = "content", "digest", "schema"  # keys of the metadata


class _Content(BaseModel):
    """The part of a checkpoint that is no array."""

    model_config = ConfigDict(strict=True, extra="forbid")
    round: int = Field(ge=0)
    names: list[str]
    clip_norms: dict[int, float | tuple[float, ...]]
    withdrawn: list[int]
    heads: dict[int, str]
    rounds_digest: str
    releases_digest: str
    best: tuple[float, int] | None


@dataclass(frozen=True)
class RunCheckpoint:
    """What `--resume` starts from.

    Attributes:
        state: the state of the server.
        heads: hash of the last record of each charged client in the ledger, as far as the server
            knew it when the round was finished.
        rounds_digest: SHA-256 of `rounds.jsonl` up to and with this round.
        releases_digest: the same of `releases.jsonl`.
    """

    state: ServerState
    heads: Mapping[int, str] = field(default_factory=dict)
    rounds_digest: str = ""
    releases_digest: str = ""

    def to_bytes(self) -> bytes:
        """Return the content of the file.

        safetensors sorts names, but a model's digest depends on their order, so `names` keeps it.
        """
        arrays = to_numpy(self.state.arrays)
        content = _Content(
            round=self.state.round_number,
            names=list(arrays),
            clip_norms=dict(self.state.clip_norms),
            withdrawn=sorted(self.state.withdrawn),
            heads=dict(self.heads),
            rounds_digest=self.rounds_digest,
            releases_digest=self.releases_digest,
            best=self.state.best,
        ).model_dump_json()
        memory = {f"{_MEMORY}{name}": value for name, value in self.state.memory.items()}
        rows = {f"{_CLIENT_MEMORY}{name}": one for name, one in self.state.client_memory.items()}
        average = {f"{_AVERAGE}{name}": value for name, value in self.state.average.items()}
        versions = {
            f"{_VERSION}{number}/{name}": value
            for number, model in self.state.versions.items()
            for name, value in to_numpy(model).items()
        }
        tensors = {
            name: np.asarray(value, order="C")
            for name, value in {**arrays, **memory, **rows, **average, **versions}.items()
        }
        metadata = {
            _SCHEMA: str(SCHEMAS[FILE]),
            _CONTENT: content,
            _DIGEST: _digest(content, tensors),
        }
        return save(tensors, metadata)

    @classmethod
    def read(cls, path: Path) -> "RunCheckpoint":
        """Read the checkpoint that `to_bytes` wrote.

        Args:
            path: the file.

        Raises:
            SchemaError: the checkpoint has another schema.
            DamagedRunError: the file differs from the digest in it, or is no checkpoint.
        """
        data = read_bytes(path)
        metadata = _read_metadata(path, data)
        try:
            tensors = load(data)
            if metadata.get(_DIGEST) != _digest(metadata[_CONTENT], tensors):
                raise ValueError("it differs from the digest in it")
            content = _Content.model_validate_json(metadata[_CONTENT])
            arrays = {name: tensors.pop(name) for name in content.names}
        except (SafetensorError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise DamagedRunError.of(path, f"the checkpoint is damaged: {error}") from error
        state = ServerState(
            arrays=to_arrays(arrays),
            round_number=content.round,
            clip_norms=content.clip_norms,
            withdrawn=frozenset(content.withdrawn),
            memory=_below(_MEMORY, tensors),
            client_memory=_below(_CLIENT_MEMORY, tensors),
            average=_below(_AVERAGE, tensors),
            best=content.best,
            versions=_versions(content.names, _below(_VERSION, tensors)),
        )
        return cls(state, content.heads, content.rounds_digest, content.releases_digest)


def _below(prefix: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays with a prefix, without it, by name: a file of tensors keeps no order."""
    named = sorted(name for name in tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): tensors[name] for name in named}


def _versions(names: Sequence[str], tensors: Mapping[str, np.ndarray]) -> dict[int, ArrayRecord]:
    """Return older global models by number, with their arrays in the order of the model."""
    numbers = sorted({int(name.partition("/")[0]) for name in tensors})
    return {
        number: to_arrays({name: tensors[f"{number}/{name}"] for name in names})
        for number in numbers
    }


def _read_metadata(path: Path, data: bytes) -> dict[str, str]:
    """Return the metadata of a checkpoint: part of the JSON after its length in eight bytes.

    Raises:
        SchemaError: the checkpoint has another schema.
        DamagedRunError: the file is no checkpoint.
    """
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")].decode())
        metadata: dict[str, str] = header["__metadata__"]
        schema = int(metadata[_SCHEMA]) if _SCHEMA in metadata else None
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamagedRunError.of(path, f"the checkpoint is damaged: {error}") from error
    check_schema(path, {_SCHEMA: schema})
    return metadata


def _digest(content: str, tensors: Mapping[str, np.ndarray]) -> str:
    state = hashlib.sha256(content.encode())
    for name, value in sorted(tensors.items()):
        state.update(f"{name}{value.dtype}{value.shape}".encode())
        state.update(np.asarray(value, order="C").tobytes())
    return state.hexdigest()


class _ClientReason(BaseModel):
    model_config = ConfigDict(strict=True)
    client: int
    reason: Any  # text of any exception, also such that is no Unicode


class _SecureRow(BaseModel):
    model_config = ConfigDict(strict=True)
    survivors: int
    aborted: Any


class _Row(BaseModel):
    """The keys of a line that fedsim reads again."""

    model_config = ConfigDict(strict=True, extra="allow")
    round: int = Field(ge=1)
    participants: list[int]
    failed: list[_ClientReason]
    withdrawn: list[_ClientReason]
    seconds: float
    epsilon_max: float | None
    timeline: dict[str, float] = {}
    secure_aggregation: _SecureRow | None = None


class RoundsFile:
    """The rounds of a run, in memory and on disk.

    Attributes:
        rows: the finished rounds, oldest first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._size = 0  # bytes of the lines
        self.rows: list[RoundRow] = []

    @property
    def digest(self) -> str:
        """SHA-256 of all lines."""
        return self._hash.hexdigest()

    def append(self, row: RoundRow) -> None:
        """Append a finished round; when this returns, it is on disk.

        Raises:
            OSError: with the name of the file.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with name_file(self._path), self._path.open("ab") as file:
            append(file, line)
        self._remember(line, row)

    @classmethod
    def read(cls, path: Path, round_number: int) -> "RoundsFile":
        """Return the rounds up to a checkpoint; the file stays as it is.

        Args:
            path: the file.
            round_number: the last round to keep.

        Raises:
            DamagedRunError: the file is missing, or a line is no round.
        """
        found = cls(path)
        for line, row in _read_lines(path):
            if row["round"] <= round_number:
                found._remember(line, row)
        return found

    def rewrite(self) -> None:
        """Drop from the file what is not in `rows`: a round after the checkpoint, a torn line."""
        write_bytes(self._path, read_bytes(self._path)[: self._size])

    def _remember(self, line: bytes, row: RoundRow) -> None:
        self._hash.update(line)
        self._size += len(line)
        self.rows.append(row)


def read_rounds(path: Path) -> list[RoundRow]:
    """Return the finished rounds, without a line that a crash cut short.

    Raises:
        DamagedRunError: the file is missing, or a line is no round.
    """
    return [row for _, row in _read_lines(path)]


def digest_of_lines(path: Path, count: int) -> str:
    """Return the SHA-256 of the first lines of the file.

    Args:
        path: the file.
        count: number of lines.
    """
    lines = read_bytes(path).split(b"\n")[:count]
    return hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest()


def _read_lines(path: Path) -> list[tuple[bytes, RoundRow]]:
    """Return each whole line with its round."""
    *lines, _unfinished = read_bytes(path).split(b"\n")
    return [(line + b"\n", _row(path, number, line)) for number, line in enumerate(lines, start=1)]


def _row(path: Path, number: int, line: bytes) -> RoundRow:
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedRunError.of(path, f"line {number} is damaged: {error}") from error
    checked(path, _Row, found)
    return cast(RoundRow, found)


Blocks = Literal["planned", "alone"]


class Releases(BaseModel):
    """What left the clients in one round.

    Attributes:
        round: the round, from 1.
        conditions: digest of the settings, plug-in sources, versions and device.
        blocks: whether clients trained in the planned blocks, or each one alone.
        model: SHA-256 of the global model after the round.
        uploads: tag of the released values of each client that sent them in clear.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    round: int = Field(ge=1)
    conditions: str
    blocks: Blocks
    model: str
    uploads: dict[int, str]

    @classmethod
    def of(cls, report: RoundReport, *, conditions: str, blocks: Blocks) -> Self:
        """Return the releases of a finished round.

        Args:
            report: the round.
            conditions: see the attributes.
            blocks: see the attributes.
        """
        return cls(
            round=report.round_number,
            conditions=conditions,
            blocks=blocks,
            model=report.model.digest,
            uploads=dict(report.clients.uploads),
        )


class ReleasesFile:
    """The file of a run that is being written; of its content only a digest is kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 of all lines."""
        return self._hash.hexdigest()

    def append(self, releases: Releases) -> None:
        """Append a round; when this returns, it is on disk.

        Raises:
            OSError: with the name of the file.
        """
        line = releases.model_dump_json().encode() + b"\n"
        with name_file(self._path), self._path.open("ab") as file:
            append(file, line)
        self._hash.update(line)

    def cut(self, round_number: int) -> None:
        """Drop from the file all rounds after a checkpoint, and a torn line.

        Args:
            round_number: the last round to keep.
        """
        *lines, _unfinished = read_bytes(self._path).split(b"\n")
        kept = b"".join(line + b"\n" for line in lines[:round_number])
        write_bytes(self._path, kept)
        self._hash = hashlib.sha256(kept)


def read_releases(path: Path) -> list[Releases]:
    """Return the releases of the finished rounds, without a line that a crash cut short.

    Raises:
        DamagedRunError: the file is missing, or a line is not of its round.
    """
    *lines, _unfinished = read_bytes(path).split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            releases = Releases.model_validate_json(line)
        except ValidationError as error:
            what = f"line {number} is damaged: {error.errors()[0]['msg']}"
            raise DamagedRunError.of(path, what) from error
        if releases.round != number:
            raise DamagedRunError.of(path, f"line {number} is of round {releases.round}")
        found.append(releases)
    return found
