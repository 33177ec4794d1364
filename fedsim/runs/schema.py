"""Schema numbers of fedsim's files, and the one check of them.

This version reads the schemas that it writes and no other. Any change of what a file means, of its
keys, of its words or of how its figures are computed raises its number. A run directory, the state
of a node and a checkpoint also name their version: another version may draw or charge differently,
so only the version that began a run or a node can resume it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedsim
from fedsim.core.errors import InputError

SCHEMAS: Mapping[str, int] = {
    "environment.json": 6,  # of the whole run directory
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
    "experiment.json": 4,  # of the state of a node's client
}
"""The schema number of each file that has one."""


class SchemaError(InputError):
    """Files that this version of fedsim cannot use; the message names the way out."""


def check_schema(path: Path, content: Mapping[str, Any]) -> None:
    """Check that a file has the schema that this version reads.

    Args:
        path: the file, whose name is one of `SCHEMAS`.
        content: its content; `schema` is its number, and `fedsim` the version that wrote it.

    Raises:
        SchemaError: the number is another one, or is missing.
    """
    found, schema = content.get("schema"), SCHEMAS[path.name]
    if type(found) is int and found == schema:
        return
    writer = f" of fedsim {content['fedsim']!s:.40}" if "fedsim" in content else ""
    what = "no schema" if found is None else f"schema {found!r:.40}"
    raise SchemaError(
        f"{path}{writer} has {what}, and fedsim {fedsim.__version__} reads schema {schema}: run "
        "again with this version, or install the version that wrote the file"
    )


def check_version(path: Path, version: str, way_out: str) -> None:
    """Check that this version of fedsim wrote the run or node that it will resume.

    Args:
        path: the directory.
        version: the version that wrote it.
        way_out: advice at the end of the message; `{version}` stands for `version`.

    Raises:
        SchemaError: another version wrote it.
    """
    if version != fedsim.__version__:
        raise SchemaError(
            f"{path} was written by fedsim {version}; this is fedsim {fedsim.__version__}: "
            + way_out.format(version=version)
        )
