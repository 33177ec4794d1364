"""`rounds.jsonl`: one line of JSON for each finished round, on disk before the checkpoint."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

from fedsim.core.errors import name_file
from fedsim.runs.files import DamagedRunError, checked, read_bytes, write_bytes
from fedsim.server.round_report import RoundRow


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
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
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
