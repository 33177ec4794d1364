"""Division of the training examples among clients, by any scheme."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.core.limits import MAX_CLIENTS
from fedsim.data.conversion import Dataset
from fedsim.data.examples import DataError
from fedsim.data.file_names import quoted
from fedsim.data.partitions.drawn import Indices, partition
from fedsim.data.partitions.given import LEFT_OUT, Assignment, assign_by_flower, assign_by_function
from fedsim.data.partitions.settings import (
    FILE_GROUP,
    ColumnPartition,
    FlwrPartition,
    FunctionPartition,
    NaturalPartition,
    PartitionSettings,
)


@dataclass(frozen=True, eq=False)
class Division:
    """The rows of each client.

    Attributes:
        rows: row numbers of each client's training examples in the dataset, sorted.
        names: public name of each client, such as a hospital; None: clients have numbers alone.
    """

    rows: tuple[Indices, ...]
    names: tuple[str, ...] | None = None


def divide(
    dataset: Dataset, rows: Indices, settings: PartitionSettings, *, seed: int, base: Path
) -> Division:
    """Return each client's rows.

    Args:
        dataset: the data.
        rows: row numbers (n,) of the training examples in `dataset.train`.
        settings: `data.partition`.
        seed: the experiment's seed; the same seed gives the same division.
        base: the directory in which relative paths start.

    Guarantees:
        Every example is on at most one client, and with a scheme of fedsim on exactly one. Every
        client has at least `settings.min_examples`.

    Raises:
        DataError: the scheme cannot divide these data; the message names the fix.
    """
    if not isinstance(settings, NaturalPartition):
        parts = partition(dataset.train.targets[rows], settings, seed)
        return Division(tuple(rows[part] for part in parts))
    found = _assignment(dataset, rows, settings, seed=seed, base=base)
    _check_number(found, settings)
    order = np.argsort(found.clients, kind="stable")
    counts = np.bincount(found.clients - LEFT_OUT, minlength=found.num_clients + 1)
    parts = np.split(rows[order], np.cumsum(counts)[:-1])[1:]  # the first ones are left out
    division = Division(tuple(np.sort(part) for part in parts), found.names)
    _check_sizes(division, settings.min_examples)
    return division


def _assignment(
    dataset: Dataset, rows: Indices, settings: NaturalPartition, *, seed: int, base: Path
) -> Assignment:
    train = dataset.train.rows(rows) if isinstance(settings, FunctionPartition) else dataset.train
    if isinstance(settings, FunctionPartition):
        return assign_by_function(train, settings, seed=seed, base=base)
    if isinstance(settings, FlwrPartition):
        groups = {name: _taken(values, rows) for name, values in dataset.groups.items()}
        return assign_by_flower(dataset.train.targets[rows], groups, settings, seed=seed)
    column = FILE_GROUP
    if isinstance(settings, ColumnPartition):
        column = settings.column
    if column not in dataset.groups:
        known = [name for name in dataset.groups if name != FILE_GROUP]
        has = f"it has {quoted(known)}" if known else "columns divide tables and archives"
        raise DataError(
            f"data.partition.column: the dataset has no column {column!r} that names clients; "
            f"{has} (any data: scheme ./file.py:function)"
        )
    values = dataset.groups[column]
    named = Assignment.by_name(values, order=isinstance(settings, ColumnPartition))
    return Assignment(named.clients[rows], named.names, named.num_clients)


def _taken(values: Sequence[str], rows: Indices) -> list[str]:
    return [str(values[row]) for row in rows.tolist()]


def _check_number(found: Assignment, settings: NaturalPartition) -> None:
    number = found.num_clients
    if number > MAX_CLIENTS:
        raise DataError(
            f"data.partition: {number:,} clients, and a federation has at most {MAX_CLIENTS:,}; "
            "divide by a column with fewer values"
        )
    if settings.num_clients not in (None, number):
        names = "" if found.names is None else f" ({quoted(found.names[:10])})"
        raise DataError(
            f"data.partition.num_clients is {settings.num_clients}, and scheme {settings.scheme} "
            f"gives {number} clients{names}; remove num_clients, or set it to {number}"
        )


def _check_sizes(division: Division, least: int) -> None:
    small = [client for client, rows in enumerate(division.rows) if len(rows) < least]
    if not small:
        return
    first = small[0]
    name = first if division.names is None else repr(division.names[first])
    others = f" ({len(small)} of {len(division.rows)} clients have so few)" if small[1:] else ""
    raise DataError(
        f"data.partition: client {name} has {len(division.rows[first])} training examples, fewer "
        f"than min_examples {least}{others}; lower min_examples, or merge or remove such clients"
    )
