"""The files of one run. Text and safetensors only, never pickle; each is whole or absent."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from fedsim.core.errors import InputError
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.runs.schema import (
    CHECKPOINT_SCHEMA,
    RUN_SCHEMA,
    Origin,
    refuse_newer_schema,
    refuse_other_version,
)
from fedsim.server.round_report import RoundRow
from fedsim.server.secure.opened_sums import OpenedSum
from fedsim.server.state import ServerState

CLIENT_COLUMNS = (
    "client",
    "examples",
    "delta",
    "epsilon",
    "epsilon_rdp",
    "target_epsilon",
    "noise_multiplier",
    "sampling_rate",
    "rounds",
    "steps",
    "group",
    "withdrawn_round",
    "clip_norm",
)

_RESUME_OR_START_ANEW = "resume it with fedsim {version}, or start a new run with another --out"
_OPENING = "checkpoint/opening.json"
_OPTIMIZER = "optimizer/"  # before the names of the optimizer's arrays in a checkpoint


class RunDirectoryError(InputError):
    """A directory that cannot hold, or does not hold, a run."""


class RunDirectory:
    """Paths and writers of a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse_overwriting(self) -> None:
        """Check that the directory is new or empty.

        Raises:
            RunDirectoryError: the directory has content; a run is never overwritten.
        """
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RunDirectoryError(
                f"{self.path} exists and is not empty; a run is never overwritten: "
                "choose another --out"
            )

    def create(
        self, *, experiment: str, environment: Mapping[str, object], inputs: Mapping[str, str]
    ) -> None:
        """Create the directory, whole or not at all, so that every directory can be resumed.

        Args:
            experiment: content of `experiment.yaml`.
            environment: content of `environment.json`.
            inputs: content of `checkpoint/inputs.json`.

        Raises:
            RunDirectoryError: the directory is not new or empty.
        """
        self.refuse_overwriting()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = RunDirectory(Path(mkdtemp(prefix=f".{self.path.name}-", dir=self.path.parent)))
        (new.path / "checkpoint").mkdir()
        new.ledger.touch()
        new.rounds.touch()
        new.write_text("experiment.yaml", experiment)
        new.write_json("environment.json", environment)
        new.write_json("checkpoint/inputs.json", inputs)
        new.path.chmod(0o755)
        _sync_directory(new.path)
        os.replace(new.path, self.path)
        _sync_directory(self.path.parent)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open the directory of an earlier run.

        Raises:
            RunDirectoryError: it holds no run.
            SchemaError: a newer fedsim wrote it.
        """
        if not (path / "experiment.yaml").is_file():
            raise RunDirectoryError(f"{path} is not a run directory: it has no experiment.yaml")
        directory = cls(path)
        refuse_newer_schema(path, directory.origin, kind="run", newest=RUN_SCHEMA)
        return directory

    @property
    def origin(self) -> Origin:
        """Version and schema of the fedsim that began the run.

        Raises:
            RunDirectoryError: `environment.json` is damaged.
            SchemaError: `environment.json` names no version.
        """
        name = "environment.json"
        return Origin.from_json(self.read_json(name) if (self.path / name).is_file() else {})

    def refuse_other_version(self) -> None:
        """Check that this version of fedsim began the run and can therefore resume it.

        Raises:
            SchemaError: another version did; the message names the way out.
        """
        refuse_other_version(
            self.path, self.origin, kind="run", schema=RUN_SCHEMA, way_out=_RESUME_OR_START_ANEW
        )

    @property
    def ledger(self) -> Path:
        """The durable, hash-chained ledger."""
        return self.path / "ledger.jsonl"

    @property
    def rounds(self) -> Path:
        """One JSON object for each finished round."""
        return self.path / "rounds.jsonl"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the directory, whole or not at all."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file of the directory, whole or not at all."""
        target = self.path / name
        temporary = target.with_name(f".{target.name}.tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file; NaN and infinity are refused."""
        self.write_text(name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Read a JSON file of the directory.

        Raises:
            RunDirectoryError: the file is missing, or is no JSON.
        """
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{self.path} has no {name}: the run is still running, or was killed before its "
                f"end; finish it with fedsim run FILE --out {self.path} --resume"
            ) from None
        except ValueError as error:
            raise RunDirectoryError(f"{self.path / name} was damaged: {error}") from error

    def append_round(self, row: Mapping[str, object]) -> None:
        """Append one finished round to `rounds.jsonl`."""
        with self.rounds.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def read_rounds(self) -> list[RoundRow]:
        """Return the finished rounds, without a line that a crash cut short."""
        *lines, _unfinished = self.rounds.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines]

    def write_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write `clients.csv` from the clients of `privacy.json`."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(CLIENT_COLUMNS)
        writer.writerows([row.get(column) for column in CLIENT_COLUMNS] for row in rows)
        self.write_text("clients.csv", buffer.getvalue())

    def write_model(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the final global model."""
        self.write_bytes("model.safetensors", _safetensors(arrays))

    def write_checkpoint(self, state: ServerState) -> None:
        """Replace the checkpoint by this state.

        The checkpoint is one file, so a crash leaves no mixture of two states. safetensors sorts
        names, but a model's digest depends on their order. The metadata keep the order.
        """
        arrays = to_numpy(state.arrays)
        metadata = {
            "schema": str(CHECKPOINT_SCHEMA),
            "round": str(state.round_number),
            "names": json.dumps(list(arrays)),
            "clip_norms": json.dumps(dict(state.clip_norms)),
            "withdrawn": json.dumps(sorted(state.withdrawn)),
        }
        optimizer = {f"{_OPTIMIZER}{name}": array for name, array in state.optimizer.items()}
        data = _safetensors({**arrays, **optimizer}, metadata=metadata)
        self.write_bytes("checkpoint/model.safetensors", data)

    def read_checkpoint(self) -> ServerState | None:
        """Return the state after the last finished round, None before the first.

        Raises:
            SchemaError: the checkpoint has another schema.
        """
        path = self.path / "checkpoint" / "model.safetensors"
        if not path.is_file():
            return None
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        schema = int(metadata.get("schema", 1))
        if schema != CHECKPOINT_SCHEMA:
            refuse_other_version(
                path,
                Origin(self.origin.version, schema),
                kind="checkpoint",
                schema=CHECKPOINT_SCHEMA,
                way_out=_RESUME_OR_START_ANEW,
            )
        return ServerState(
            arrays=to_arrays({name: tensors[name] for name in json.loads(metadata["names"])}),
            round_number=int(metadata["round"]),
            clip_norms={int(one): norm for one, norm in json.loads(metadata["clip_norms"]).items()},
            withdrawn=frozenset(json.loads(metadata["withdrawn"])),
            optimizer={
                name.removeprefix(_OPTIMIZER): array
                for name, array in tensors.items()
                if name.startswith(_OPTIMIZER)
            },
        )

    def write_opening(self, opening: OpenedSum) -> None:
        """Record the client set of the next secure sum; it replaces the previous record."""
        self.write_json(_OPENING, {"round": opening.round_number, "clients": list(opening.clients)})

    def read_opening(self) -> OpenedSum | None:
        """Return the client set of the last secure sum; None before the first.

        Raises:
            RunDirectoryError: the file is damaged.
        """
        if not (self.path / _OPENING).is_file():
            return None
        found = self.read_json(_OPENING)
        return OpenedSum(int(found["round"]), tuple(int(client) for client in found["clients"]))

    def forget_rounds_after(self, round_number: int) -> list[RoundRow]:
        """Drop the rounds after the last checkpoint, and return the others."""
        rows = [row for row in self.read_rounds() if row["round"] <= round_number]
        self.write_text(
            "rounds.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        )
        return rows


def _safetensors(arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata)


def _sync_directory(path: Path) -> None:
    """Make new file names durable where the platform can, so that no crash loses a ledger."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)
