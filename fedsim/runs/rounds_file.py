"""`rounds.jsonl` and `releases.jsonl`: one line of JSON for each round, on disk in this order.

A line of `releases.jsonl` has the tags of every value that left a client; `fedsim verify RUN
--replay` computes them again. It is on disk before its round is in `rounds.jsonl`, so no finished
round is without it, and that is on disk before the checkpoint.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsim.core.durable import append
from fedsim.core.errors import name_file
from fedsim.runs.files import DamagedRunError, checked, read_bytes, write_bytes
from fedsim.server.round_report import RoundReport, RoundRow


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
