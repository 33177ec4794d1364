"""The checkpoint of a run: the server's state after a round, and what the other files held then.

One safetensors file, so that a crash leaves no mixture of two states. Its metadata hold a digest of
everything in it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedsim.algorithms.state import ServerState
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.runs.files import SCHEMAS, DamagedRunError, check_schema, read_bytes

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
