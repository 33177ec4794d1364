"""Types for the records in a run's files: rounds, releases, checkpoint and model card.

Each round ends with a line in `releases.jsonl`, a line in `rounds.jsonl` and a new checkpoint. They
are written in this order, and each is begun when the one before is on disk. The checkpoint is one
safetensors file with a digest of its content, so that a crash leaves no mixture of two states.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, PlainSerializer, PlainValidator

from fedsim.accountant import PrivacyLedger
from fedsim.algorithms.state import ServerState
from fedsim.core.text_formats import parse_json
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.runs.files import (
    SCHEMAS,
    DamagedRunError,
    SchemaError,
    arrays_bytes,
    check_schema,
    read_arrays,
)
from fedsim.server.round_report import RoundRow

# Prefixes of the names of arrays that are not the global model, by field of the server's state.
_PREFIXES = {"memory": "optimizer/", "client_memory": "clients/", "average": "average/"}
_VERSION = "version/"  # prefix of the number and names of an older global model
_CONTENT, _DIGEST, _SCHEMA = "content", "digest", "schema"  # keys of the metadata


class _Content(BaseModel, strict=True, extra="forbid"):
    """The values of a checkpoint that are not arrays."""

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
    """A checkpoint after a finished round, from which `--resume` continues."""

    state: ServerState
    heads: Mapping[int, str] = field(default_factory=dict)  # last ledger record of each client
    rounds_digest: str = ""  # SHA-256 of the lines of `rounds.jsonl` up to this round
    releases_digest: str = ""

    def to_bytes(self) -> bytes:
        """Return the content of a safetensors file; `names` has the order, which that loses."""
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
        groups = {prefix: getattr(self.state, name) for name, prefix in _PREFIXES.items()}
        groups |= {f"{_VERSION}{k}/": to_numpy(m) for k, m in self.state.versions.items()}
        tensors = dict(arrays)
        for prefix, values in groups.items():
            tensors |= {f"{prefix}{name}": value for name, value in values.items()}
        digest = _digest(content, tensors)
        metadata = {_SCHEMA: str(SCHEMAS["model.safetensors"]), _CONTENT: content, _DIGEST: digest}
        return arrays_bytes(tensors, metadata)

    @classmethod
    def read(cls, path: Path) -> "RunCheckpoint":
        """Return the checkpoint in a file.

        Raises:
            SchemaError: this version of fedsim cannot read the checkpoint.
            DamagedRunError: the file differs from its digest, or is no checkpoint.
        """
        tensors, metadata = read_arrays(path, "the checkpoint")
        try:
            check_schema(path, {_SCHEMA: int(metadata[_SCHEMA]) if _SCHEMA in metadata else None})
            if metadata.get(_DIGEST) != _digest(metadata[_CONTENT], tensors):
                raise ValueError("it differs from the digest in it")
            content = _Content.model_validate_json(metadata[_CONTENT])
            arrays = {name: tensors.pop(name) for name in content.names}
        except SchemaError:
            raise
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise DamagedRunError.of(path, f"the checkpoint is damaged: {error}") from error
        older = _below(_VERSION, tensors)
        numbers = sorted({int(name.partition("/")[0]) for name in older})
        state = ServerState(
            arrays=to_arrays(arrays),
            round_number=content.round,
            clip_norms=content.clip_norms,
            withdrawn=frozenset(content.withdrawn),
            best=content.best,
            **{name: _below(prefix, tensors) for name, prefix in _PREFIXES.items()},
            versions={
                number: to_arrays({name: older[f"{number}/{name}"] for name in arrays})
                for number in numbers
            },
        )
        return cls(state, content.heads, content.rounds_digest, content.releases_digest)


def _below(prefix: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names have a prefix, by name without the prefix, sorted."""
    named = sorted(name for name in tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): tensors[name] for name in named}


def _digest(content: str, tensors: Mapping[str, np.ndarray]) -> str:
    state = hashlib.sha256(content.encode())
    for name, value in sorted(tensors.items()):
        state.update(f"{name}{value.dtype}{value.shape}".encode())
        state.update(np.asarray(value, order="C").tobytes())
    return state.hexdigest()


class _ClientReason(BaseModel, strict=True):
    client: int
    reason: Any  # text of any exception, also such that is no Unicode


class _SecureRow(BaseModel, strict=True):
    survivors: int
    aborted: Any


class RoundLine(BaseModel, strict=True, extra="allow"):
    """The keys of a line of `rounds.jsonl` that fedsim reads again."""

    round: int = Field(ge=1)
    participants: list[int]
    failed: list[_ClientReason]
    withdrawn: list[_ClientReason]
    seconds: float
    epsilon_max: float | None
    timeline: dict[str, float] = {}
    secure_aggregation: _SecureRow | None = None


MIN_REPETITIONS = 3


def repeated_failures(rows: Sequence[RoundRow]) -> list[dict[str, Any]]:
    """Return the clients that failed in `MIN_REPETITIONS` rounds or more for the same reason.

    Each is {"client": its number, "rounds": number of these rounds, "reason": what it reported}.
    """
    counts = Counter((one["client"], str(one["reason"])) for row in rows for one in row["failed"])
    return [
        {"client": client, "rounds": count, "reason": reason}
        for (client, reason), count in sorted(counts.items())
        if count >= MIN_REPETITIONS
    ]


def absent_clients(rows: Sequence[RoundRow]) -> tuple[int, ...]:
    """Return the numbers of clients that failed and are in no average of any round, ascending."""
    failed = {failure["client"] for row in rows for failure in row["failed"]}
    return tuple(sorted(failed - {client for row in rows for client in row["participants"]}))


def given_up(row: RoundRow) -> str | None:
    """Return the reason if a round was given up, maybe before its clients were asked; else None."""
    secure = row.get("secure_aggregation")
    return row.get("aborted") if secure is None else secure["aborted"]


class Releases(BaseModel, strict=True, extra="forbid", frozen=True):
    """The tags (keyed checksums) of the clients' uploads in one round: a line of `releases.jsonl`.

    An encrypted upload has no tag. `fedsim verify RUN --replay` computes the tags again.
    """

    round: int = Field(ge=1)
    conditions: str  # digest of the settings, plug-in sources, versions and device
    blocks: Literal["planned", "alone"]  # whether clients trained together or one by one
    model: str  # SHA-256 of the global model after the round
    uploads: dict[Annotated[int, Field(strict=False)], str]  # keys of JSON are texts


_CARD = "fedsim"  # one entry of the metadata: safetensors writes several in any order


class ModelCard(BaseModel, extra="forbid", frozen=True):
    """The description of a saved model: how to use the model, and where it comes from."""

    input_shape: tuple[int, ...]  # of an example after `model.features`
    num_outputs: int
    raw_input_shape: tuple[int, ...]  # of an example in the dataset
    task: str
    class_names: tuple[str, ...] | None
    columns: tuple[str, ...] | None  # the features of a table, in the order of the inputs
    experiment: str
    rounds: int
    metrics: Mapping[str, Any]
    statement: str
    fedsim: str
    values: str | None = None  # digest of the trained values, where the file holds a derived model

    def to_json(self) -> dict[str, Any]:
        """Return the card as a JSON object."""
        return self.model_dump(mode="json", exclude={"values"} if self.values is None else None)

    def to_metadata(self) -> dict[str, str]:
        """Return the card as metadata of a safetensors file."""
        return {_CARD: json.dumps(self.to_json())}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """Return the card that the metadata of a safetensors file hold, or raise a ValueError."""
        try:
            return cls.model_validate(parse_json(metadata[_CARD]))
        except (KeyError, ValueError) as error:
            raise ValueError("it does not say what inputs the model takes") from error


def _read_ledger(value: object) -> PrivacyLedger:
    if isinstance(value, PrivacyLedger):
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be a list of events, got {value!r:.40}")
    return PrivacyLedger.from_list(value)


LedgerField = Annotated[
    PrivacyLedger, PlainValidator(_read_ledger), PlainSerializer(PrivacyLedger.to_list)
]
"""Type of a field with a privacy ledger, which a file has as a list (`PrivacyLedger.to_list`)."""
