"""Reading and writing of the files in a run directory.

A crash leaves no half-written file, and no file is a pickle.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord
from pydantic import BaseModel, RootModel

from fedsim.accountant.ledger.journal import Charge, FileJournal
from fedsim.algorithms.state import ServerState
from fedsim.core.durable import GENESIS, replace_file, sync_directory
from fedsim.experiment import ExperimentWithClients, read_settings
from fedsim.protocol.arrays import to_numpy
from fedsim.runs.client_columns import clients_table
from fedsim.runs.files import (
    SCHEMAS,
    DamagedRunError,
    RunLock,
    arrays_bytes,
    check_schema,
    read_arrays,
    read_bytes,
    read_lines,
    read_object,
    read_sealed,
    refuse_in_use,
    write_sealed,
)
from fedsim.runs.files import RunDirectoryError as RunDirectoryError
from fedsim.runs.records import Releases, RoundLine, RunCheckpoint
from fedsim.server.round_report import RoundRow
from fedsim.server.secure.opened_sums import OpenedSum
from fedsim.statement.privacy_file import PrivacyFile

KEPT = "checkpoint/"  # not published: only resuming and comparing need it
_CHECKPOINT = "checkpoint/model.safetensors"
_ENVIRONMENT = "environment.json"
_SELECTION = "selection.json"  # in place of _ENVIRONMENT where a search published only the model
MODEL = "model.safetensors"
_INPUTS = "checkpoint/inputs.json"
_OPENING = "checkpoint/opening.json"


class _Opening(BaseModel, strict=True, extra="forbid"):
    round: int
    clients: list[int]
    sum: str = ""


class _Digests(RootModel[dict[str, str]]):
    """The digest of each input of a run, by the name of the input."""


class RunDirectory:
    """A run directory: the paths of its files, and methods that write and read them.

    A missing or damaged file raises a DamagedRunError, and one of another version a SchemaError.
    A missing JSON file, and a path with a NUL character, raise a RunDirectoryError.
    """

    def __init__(self, path: Path) -> None:
        if "\0" in str(path):
            raise RunDirectoryError(f"{str(path)!r:.80} is no path: it has a NUL character")
        self.path = path
        self.ledger = path / "ledger.jsonl"
        self.rounds = path / "rounds.jsonl"
        self.releases = path / "releases.jsonl"
        self.report = path / "report.html"
        self._lock: RunLock | None = None

    def refuse_overwriting(self) -> None:
        """Refuse a directory with content: a run is never overwritten."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            refuse_in_use(self.path)
            raise RunDirectoryError(
                f"{self.path} exists and is not empty; a run is never overwritten: "
                "choose another --out"
            )

    def create(
        self,
        *,
        experiment: str,
        environment: Mapping[str, object],
        inputs: Mapping[str, str],
        opens_sums: bool = False,
    ) -> None:
        """Create the directory with the first files of a run, and lock it for this process.

        The directory appears with all files that a resumed run needs and the lock, or not at all.
        With `opens_sums`, `checkpoint/opening.json` records the sums that secure aggregation opens.

        Raises:
            RunDirectoryError: the directory is not new or empty.
            RunInUseError: another process began a run there at the same time.
            OSError: the directory cannot be written; all files written so far are removed.
        """
        self.refuse_overwriting()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = RunDirectory(Path(mkdtemp(prefix=f".{self.path.name}-", dir=self.path.parent)))
        try:
            (new.path / "checkpoint").mkdir()
            self._lock = RunLock(new.path)
            for path in (new.ledger, new.rounds, new.releases):
                path.touch()
            new.write_text("experiment.yaml", experiment)
            new.write_json(_ENVIRONMENT, environment)
            write_sealed(new.path / _INPUTS, {**inputs, "environment": new._environment_digest()})
            if opens_sums:
                new.write_opening(OpenedSum(0, ()))
            new.path.chmod(0o755)
            sync_directory(new.path)
            self._lock.follow(self.path)
            try:
                os.replace(new.path, self.path)
            except OSError:
                self.refuse_overwriting()  # another process took the name first
                raise
            sync_directory(self.path.parent)
        except BaseException:
            shutil.rmtree(new.path, ignore_errors=True)
            if not self.is_locked:
                self.unlock()
            raise

    def lock(self) -> None:
        """Keep others from writing this run until `unlock`; a RunInUseError if one is."""
        self._lock = RunLock(self.path)

    @property
    def is_locked(self) -> bool:
        """Whether this object holds the lock of the run."""
        return self._lock is not None and self._lock.is_held

    def unlock(self) -> None:
        """Release the lock of the run, if this object holds it."""
        if self._lock is not None:
            self._lock.close()

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open the directory of an earlier run, or raise a RunDirectoryError."""
        if not any((path / name).is_file() for name in ("experiment.yaml", "manifest.json")):
            raise RunDirectoryError(f"{path} is not a run directory: it has no experiment.yaml")
        directory = cls(path)
        directory.read_version()
        return directory

    def read_version(self) -> str:
        """Return the version of fedsim that began the run, or the search for its model."""
        path, selection = self.path / _ENVIRONMENT, self.path / _SELECTION
        if not path.exists() and selection.is_file():
            path = selection
        content = read_object(path)
        check_schema(path, content)
        version = content.get("fedsim")
        if not isinstance(version, str):
            raise DamagedRunError.of(path, f"fedsim = {version!r:.40} names no version")
        return version

    def write_text(self, name: str, text: str) -> None:
        """Write a text file of the directory as a whole: no half-written file is left."""
        replace_file(self.path / name, text.encode())

    def remove(self, name: str) -> None:
        """Remove a file of the directory, if it exists; on return, the removal is on disk."""
        if (self.path / name).exists():
            (self.path / name).unlink()
            sync_directory(self.path)

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file of the directory; NaN or infinity raises a ValueError."""
        self.write_text(name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; without the file, an error says how to resume."""
        if not (self.path / name).exists():
            raise RunDirectoryError(
                f"{self.path} has no {name}: the run is still running, or was killed before its "
                f"end; finish it with fedsim run FILE --out {self.path} --resume"
            )
        content = read_object(self.path / name)
        if name in SCHEMAS:
            check_schema(self.path / name, content)
        return content

    def read_inputs(self) -> dict[str, str]:
        """Return the recorded digests of data, model and plug-ins, by name."""
        digests = read_sealed(self.path / _INPUTS, _Digests).root
        if digests.pop("environment", None) != self._environment_digest():
            raise DamagedRunError.of(self.path / _ENVIRONMENT, "the file was changed")
        return digests

    def _environment_digest(self) -> str:
        return hashlib.sha256(read_bytes(self.path / _ENVIRONMENT)).hexdigest()

    def write_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write `clients.csv` from the clients' rows of `privacy.json`."""
        self.write_text("clients.csv", clients_table(rows))

    def has_model(self, arrays: ArrayRecord) -> bool:
        """Whether the final global model has the names, shapes, types and bits of these arrays."""
        saved, _ = read_arrays(self.path / MODEL)
        return arrays_bytes(saved, {}) == arrays_bytes(to_numpy(arrays), {})

    def write_model(self, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
        """Write the final global model; the metadata are facts that loading it needs."""
        replace_file(self.path / MODEL, arrays_bytes(arrays, metadata))

    def write_checkpoint(self, checkpoint: RunCheckpoint) -> None:
        """Write a checkpoint in place of the previous one."""
        replace_file(self.path / _CHECKPOINT, checkpoint.to_bytes())

    def read_checkpoint(self) -> RunCheckpoint | None:
        """Return the checkpoint after the last finished round; None before the first round ends."""
        path = self.path / _CHECKPOINT
        return RunCheckpoint.read(path) if path.exists() else None

    def write_opening(self, opening: OpenedSum) -> None:
        """Record which clients are in the secure sum that is opened next, in place of the last."""
        clients = list(opening.clients)
        content = _Opening(round=opening.round_number, clients=clients, sum=opening.digest)
        write_sealed(self.path / _OPENING, content.model_dump(exclude_defaults=True))

    def read_opening(self) -> OpenedSum | None:
        """Return the record of the last sum that secure aggregation opened; None without sums."""
        if not (self.path / _OPENING).exists():
            return None
        opening = read_sealed(self.path / _OPENING, _Opening)
        return OpenedSum(opening.round, tuple(opening.clients), opening.sum)


class RunFiles:
    """The content of a run's files; a file is read on first use, and raises an error if damaged."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The content of `environment.json`."""
        return self.directory.read_json(_ENVIRONMENT)

    @cached_property
    def experiment(self) -> ExperimentWithClients:
        """The experiment in `experiment.yaml`."""
        return read_settings(self.directory.path / "experiment.yaml")

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return self.directory.read_json("summary.json")

    @cached_property
    def privacy(self) -> PrivacyFile:
        """The content of `privacy.json`."""
        return cast(PrivacyFile, self.directory.read_json("privacy.json"))

    @property
    def clients(self) -> list[dict[str, Any]]:
        """The clients' rows in `privacy.json`; without privacy, a row has no privacy spend."""
        return self.privacy["clients"]

    @cached_property
    def rounds(self) -> list[RoundRow]:
        """The finished rounds in `rounds.jsonl`, without a last line that was cut short."""
        lines = read_lines(self.directory.rounds, RoundLine)
        return [cast(RoundRow, content) for _, content in lines]

    @property
    def last_round(self) -> dict[str, Any] | None:
        """The line of `rounds.jsonl` for the last round of `summary.json`; None without rounds."""
        number, rows = self.summary["rounds"], self.rounds
        return cast(dict[str, Any], rows[number - 1]) if 0 < number <= len(rows) else None

    @cached_property
    def releases(self) -> list[Releases]:
        """The lines of `releases.jsonl`: checksums of the uploads of each finished round."""
        path = self.directory.releases
        rounds = [releases for releases, _ in read_lines(path, Releases)]
        for number, releases in enumerate(rounds, start=1):
            if releases.round != number:
                raise DamagedRunError.of(path, f"line {number} is of round {releases.round}")
        return rounds

    @cached_property
    def charges(self) -> Mapping[int, Sequence[Charge]]:
        """The charges of each client in `ledger.jsonl`, oldest first.

        A missing file raises a DamagedRunError. A JournalError names a record that does not fit its
        hash chain.
        """
        if not self.directory.ledger.is_file():
            raise DamagedRunError.of(self.directory.ledger, "the file is missing")
        return FileJournal(self.directory.ledger).histories()

    @property
    def all_charges(self) -> Iterator[Charge]:
        """Every charge in `ledger.jsonl`, client by client."""
        return chain.from_iterable(self.charges.values())

    @cached_property
    def histories(self) -> Mapping[int, Sequence[Charge]]:
        """The charges of each client, after a check that `ledger.jsonl` lost no recorded charge.

        Later charges than those that `privacy.json` names are allowed. A DamagedRunError is raised
        if one of these is missing, or if `privacy.json` names none; otherwise as for `charges`.
        """
        recorded = self.optional("privacy.json") or {"clients": []}
        try:
            heads = {row["client"]: row["ledger_head"] for row in recorded["clients"]}
        except (KeyError, TypeError) as error:
            path = self.directory.path / "privacy.json"
            raise DamagedRunError.of(path, f"the file is damaged: {error!r:.80}") from error
        for client, head in heads.items():
            hashes = [GENESIS, *(charge.hash for charge in self.charges.get(client, ()))]
            if head not in hashes:
                damage = f"the record of client {client} that privacy.json names as its last"
                raise DamagedRunError.of(self.directory.ledger, f"it lacks {damage}")
        return self.charges

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder `checkpoint/` exists; it may be missing in a run that was shared."""
        return (self.directory.path / KEPT).is_dir()

    @cached_property
    def checkpoint(self) -> RunCheckpoint | None:
        """The content of the checkpoint file; None before the first round has finished."""
        return self.directory.read_checkpoint()

    @property
    def state(self) -> ServerState | None:
        """The state of the server in the checkpoint; None before the first round has finished."""
        return None if self.checkpoint is None else self.checkpoint.state

    def optional(self, name: str) -> dict[str, Any] | None:
        """Return the content of a JSON file that only some runs have; None if it is missing."""
        is_there = (self.directory.path / name).exists()
        return self.directory.read_json(name) if is_there else None


def privacy_text(content: Mapping[str, Any]) -> str:
    """Return the text of `privacy.json`, with one line for each client; `clients` is last."""
    text = json.dumps({**content, "clients": []}, indent=2, allow_nan=False)
    encode = json.JSONEncoder(allow_nan=False).encode  # without an indent, it is in C
    lines = ",\n    ".join(map(encode, content["clients"]))
    return text.removesuffix("[]\n}") + f"[\n    {lines}\n  ]\n}}\n"
