"""Schema numbers of fedsim's files, and the refusal of files that this version cannot use.

| number | stands in | goes up when |
|---|---|---|
| RUN_SCHEMA | `environment.json` | any file of a run directory changes its meaning |
| CHECKPOINT_SCHEMA | metadata of `checkpoint/model.safetensors` | `--resume` needs other content |
| PRIVACY_SCHEMA | `privacy.json` | an older reader would misread it |
| MANIFEST_SCHEMA | `manifest.json` | an older reader would misread it |
| NODE_STATE_SCHEMA | `experiment.json` of a node's client | the state of a SuperNode changes |
| COMPARISON_SCHEMA | the JSON files that a comparison adds | an older reader would misread them |

Older runs and comparisons stay readable. Only the version that began a run or a node can resume
it: another version may draw or charge differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedsim
from fedsim.core.errors import InputError

RUN_SCHEMA = 5
CHECKPOINT_SCHEMA = 4
PRIVACY_SCHEMA = 2
MANIFEST_SCHEMA = 1
NODE_STATE_SCHEMA = 3
COMPARISON_SCHEMA = 1
PERSONALIZATION_SCHEMA = 1
SCORES_SCHEMA = 1
ANSWERS_SCHEMA = 1
CLIENT_DATA_SCHEMA = 1

MANIFEST_SINCE = 4  # the first run schema with a manifest
TRUST_SINCE = 5  # the first run schema with a trust model and certificates
CHECKPOINT_SINCE_MANIFEST = 4  # the checkpoint schema of those runs

_FIRST = {"fedsim": "0.1.0", "schema": 1}  # wrote no number for runs, checkpoints and nodes


class SchemaError(InputError):
    """Files that this version of fedsim cannot use; the message names the way out."""


@dataclass(frozen=True)
class Origin:
    """The fedsim that wrote a file.

    Attributes:
        version: the version of fedsim.
        schema: the schema number of the file.
    """

    version: str
    schema: int

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Origin":
        """Read `fedsim` and `schema`; a file without a schema number is of fedsim 0.1.0.

        Raises:
            SchemaError: a value is of the wrong type.
        """
        version = content.get("fedsim", _FIRST["fedsim"])
        schema = content.get("schema", _FIRST["schema"])
        if not isinstance(version, str) or not isinstance(schema, int):
            raise SchemaError(f"fedsim = {version!r} and schema = {schema!r} name no version")
        return cls(version, schema)

    @property
    def is_this_version(self) -> bool:
        """Whether this version of fedsim wrote the file."""
        return self.version == fedsim.__version__


def refuse_newer_schema(path: Path, origin: Origin, *, kind: str, newest: int) -> None:
    """Check that this version can read a file or directory.

    Args:
        path: the file or directory.
        origin: its writer.
        kind: the word before "schema" in the message, such as "run".
        newest: the highest number that this version reads.

    Raises:
        SchemaError: the schema number is higher.
    """
    if origin.schema > newest:
        raise SchemaError(
            f"{path} was written by fedsim {origin.version} ({kind} schema {origin.schema}); this "
            f"is fedsim {fedsim.__version__}, which reads schemas up to {newest}: "
            "use a newer fedsim"
        )


def refuse_other_version(
    path: Path, origin: Origin, *, kind: str, schema: int, way_out: str
) -> None:
    """Check that this version of fedsim wrote the run or node that it will resume.

    Args:
        path: the file or directory.
        origin: its writer.
        kind: the word before "schema" in the message, such as "checkpoint".
        schema: the number that this version writes.
        way_out: advice at the end of the message; `{version}` stands for the writer's version.

    Raises:
        SchemaError: the version or the schema number differs.
    """
    if not origin.is_this_version or origin.schema != schema:
        raise SchemaError(
            f"{path} was written by fedsim {origin.version} ({kind} schema {origin.schema}); this "
            f"is fedsim {fedsim.__version__} (schema {schema}): "
            + way_out.format(version=origin.version)
        )
