"""`releases.jsonl`: tags of every value that left a client, one line of JSON for each round.

`fedsim verify RUN --replay` computes them again. A line is on disk before its round is in
`rounds.jsonl`, so no finished round is without it.
"""

import hashlib
import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsim.core.errors import name_file
from fedsim.runs.files import DamagedRunError, read_bytes, write_bytes
from fedsim.server.round_report import RoundReport

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
            model=report.model_digest,
            uploads=dict(report.uploads),
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
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
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
