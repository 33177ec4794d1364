"""Division of the training examples among clients, at random or by any other scheme.

Every random scheme first draws how many examples of each group each client gets. The scheme then
deals the shuffled examples of each group by these numbers. In the schemes `dirichlet` and `shards`
each class is a group; in the others all examples are one group.

References:
    dirichlet: Yurochkin et al. 2019 (arXiv 1905.12022); Li et al. 2021 (arXiv 2102.02079).
    shards: after McMahan et al. 2017 (arXiv 1602.05629), but with exactly
        `classes_per_client` classes on each client.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.core.limits import MAX_CLIENTS
from fedsim.core.streams import Purpose, stream
from fedsim.data.examples import DataError, Dataset
from fedsim.data.file_names import quoted
from fedsim.data.partitions.given import LEFT_OUT, Assignment, assign_by_flower, assign_by_function
from fedsim.data.settings import (
    FILE_GROUP,
    ColumnPartition,
    DirichletPartition,
    FlwrPartition,
    FunctionPartition,
    IidPartition,
    NaturalPartition,
    PartitionSettings,
    QuantityPartition,
    ShardsPartition,
)

Indices = NDArray[np.int64]
DrawnPartition = IidPartition | DirichletPartition | ShardsPartition | QuantityPartition
CountTable = NDArray[np.int64]  # (groups, clients): numbers of examples of a group on a client

MAX_DRAWS = 1000  # most draws of the table of counts, until every client has min_examples


def partition(
    targets: NDArray[np.int64] | NDArray[np.float32], settings: DrawnPartition, seed: int
) -> list[Indices]:
    """Return the sorted example indices of each client, drawn by a random scheme.

    Args:
        targets: target of each example; class numbers int64 (n,) for `dirichlet` and `shards`.
        settings: the scheme and its parameters.
        seed: the experiment's seed; the same seed gives the same partition.

    Guarantees:
        Every example is on exactly one client and every client has at least
        `settings.min_examples`. With `shards` every client holds exactly `classes_per_client`
        classes, and every class is on some client.

    Raises:
        DataError: the partition is impossible, or in each of `MAX_DRAWS` random draws some client
            had fewer than `settings.min_examples` examples.
    """
    num_examples, num_clients = len(targets), settings.num_clients
    if num_clients * settings.min_examples > num_examples:
        raise DataError(
            f"data.partition: {num_clients} clients with min_examples {settings.min_examples} need "
            f"{num_clients * settings.min_examples} training examples, there are {num_examples}; "
            "lower num_clients or min_examples"
        )
    groups = _groups(targets, settings)
    sizes = np.array([len(group) for group in groups])
    rng = stream(seed, Purpose.PARTITION)
    counts = _draw_until_enough(settings, sizes, rng)
    dealt = [
        np.split(rng.permutation(group), np.cumsum(row)[:-1])
        for group, row in zip(groups, counts, strict=True)
    ]
    return [np.sort(np.concatenate(parts)) for parts in zip(*dealt, strict=True)]


def _groups(targets: NDArray[np.generic], settings: DrawnPartition) -> list[Indices]:
    if isinstance(settings, IidPartition | QuantityPartition):
        return [np.arange(len(targets))]
    if targets.dtype.kind not in "iu" or targets.ndim != 1:
        raise DataError(
            f"data.partition: scheme {settings.scheme} divides by class and needs whole-number "
            f"targets, got {targets.dtype} of shape {targets.shape}; use scheme iid or quantity"
        )
    _, codes = np.unique(targets, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.cumsum(np.bincount(codes))[:-1])


def _counts(settings: DrawnPartition, sizes: CountTable, rng: np.random.Generator) -> CountTable:
    """Return one draw of the table of counts."""
    if isinstance(settings, IidPartition):
        return _even(sizes[0], settings.num_clients)[None]
    if isinstance(settings, ShardsPartition):
        return _shards(sizes, settings, rng)
    if isinstance(settings, QuantityPartition):
        reserved = settings.num_clients * settings.min_examples
        return settings.min_examples + _dirichlet(sizes - reserved, settings, rng)
    return _dirichlet(sizes, settings, rng)


def _draw_until_enough(
    settings: DrawnPartition, sizes: CountTable, rng: np.random.Generator
) -> CountTable:
    for _ in range(MAX_DRAWS):
        counts = _counts(settings, sizes, rng)
        if counts.sum(axis=0).min() >= settings.min_examples:
            return counts
    fix = "lower num_clients or min_examples"
    if isinstance(settings, DirichletPartition):
        fix = f"raise alpha (now {settings.alpha:g}), or {fix}"
    raise DataError(
        f"data.partition: scheme {settings.scheme} left a client with fewer than min_examples "
        f"{settings.min_examples} in each of {MAX_DRAWS} draws; {fix}"
    )


def _even(size: int, parts: int) -> CountTable:
    counts = np.full(parts, size // parts)
    counts[: size % parts] += 1
    return counts


def _dirichlet(
    sizes: CountTable, settings: DirichletPartition | QuantityPartition, rng: np.random.Generator
) -> CountTable:
    shares = rng.dirichlet(np.full(settings.num_clients, settings.alpha), size=len(sizes))
    # Rounded cuts, not rounded shares, keep the sum of a group's counts. Rounding down would give
    # the last client the rest of every group.
    cuts = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
    cuts[:, -1] = sizes
    return np.diff(cuts, axis=1, prepend=0)


def _shards(sizes: CountTable, settings: ShardsPartition, rng: np.random.Generator) -> CountTable:
    per_client, num_clients = settings.classes_per_client, settings.num_clients
    holders = _holders(sizes, settings, rng)
    counts = np.zeros((len(sizes), num_clients), dtype=np.int64)
    remaining = holders.copy()
    for client in rng.permutation(num_clients):
        # The classes with most holders left to assign, ties at random. In this order no class ever
        # has more holders left to assign than clients remain.
        chosen = np.lexsort((rng.random(len(sizes)), -remaining))[:per_client]
        remaining[chosen] -= 1
        counts[chosen, client] = 1
    for row, size, parts in zip(counts, sizes, holders, strict=True):
        row[row == 1] = _even(size, parts)
    return counts


def _holders(sizes: CountTable, settings: ShardsPartition, rng: np.random.Generator) -> CountTable:
    """Return the number of clients of each class, as equal as the classes' sizes allow."""
    per_client, num_clients = settings.classes_per_client, settings.num_clients
    limits = np.minimum(sizes, num_clients)
    _check_shards(limits, settings)
    slots = num_clients * per_client
    level = 0
    while np.minimum(limits, level + 1).sum() <= slots and level < num_clients:
        level += 1
    holders = np.minimum(limits, level)
    extra = rng.permutation(np.flatnonzero(limits > level))[: slots - holders.sum()]
    holders[extra] += 1
    return holders


def _check_shards(limits: CountTable, settings: ShardsPartition) -> None:
    per_client, num_clients = settings.classes_per_client, settings.num_clients
    classes = len(limits)
    if per_client > classes:
        raise DataError(
            f"data.partition: classes_per_client must be at most the number of classes, "
            f"{classes}, got {per_client}"
        )
    if num_clients * per_client < classes:
        raise DataError(
            f"data.partition: {num_clients} clients with classes_per_client {per_client} leave "
            f"some of the {classes} classes unused; raise classes_per_client to "
            f"{-(-classes // num_clients)} or num_clients to {-(-classes // per_client)}"
        )
    if limits.sum() < num_clients * per_client:
        raise DataError(
            f"data.partition: some classes have too few examples to put {per_client} classes on "
            f"each of {num_clients} clients; lower classes_per_client or num_clients"
        )


def divide(
    dataset: Dataset, rows: Indices, settings: PartitionSettings, *, seed: int, base: Path
) -> tuple[list[Indices], tuple[str, ...] | None]:
    """Divide the training examples among clients.

    The result is the row numbers of each client's examples, sorted, and the clients' public names,
    such as hospitals. The names are None if clients have only numbers.

    Args:
        dataset: the dataset.
        rows: row numbers (n,) of the training examples in `dataset.train`.
        settings: the setting `data.partition`.
        seed: the experiment's seed; the same seed gives the same division.
        base: the directory to which relative paths refer.

    Guarantees:
        Every example is on at most one client, and with a built-in scheme on exactly one. Every
        client has at least `settings.min_examples`.

    Raises:
        DataError: the scheme cannot divide these data; the message names the fix.
    """
    if not isinstance(settings, NaturalPartition):
        parts = partition(dataset.train.targets[rows], settings, seed)
        return [rows[part] for part in parts], None
    assignment = _assignment(dataset, rows, settings, seed=seed, base=base)
    _check_number(assignment, settings)
    order = np.argsort(assignment.clients, kind="stable")
    counts = np.bincount(assignment.clients - LEFT_OUT, minlength=assignment.num_clients + 1)
    parts = np.split(rows[order], np.cumsum(counts)[:-1])[1:]  # the first part is left out
    parts = [np.sort(part) for part in parts]
    _check_sizes(parts, assignment.names, settings.min_examples)
    return parts, assignment.names


def _assignment(
    dataset: Dataset, rows: Indices, settings: NaturalPartition, *, seed: int, base: Path
) -> Assignment:
    if isinstance(settings, FunctionPartition):
        return assign_by_function(dataset.train.rows(rows), settings, seed=seed, base=base)
    if isinstance(settings, FlwrPartition):
        taken = rows.tolist()
        groups = {name: [str(v[row]) for row in taken] for name, v in dataset.groups.items()}
        return assign_by_flower(dataset.train.targets[rows], groups, settings, seed=seed)
    column = settings.column if isinstance(settings, ColumnPartition) else FILE_GROUP
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


def _check_number(assignment: Assignment, settings: NaturalPartition) -> None:
    number = assignment.num_clients
    if not number:
        raise DataError("data.partition: every training example is on no client; put some on one")
    if number > MAX_CLIENTS:
        raise DataError(
            f"data.partition: {number:,} clients, and a federation has at most {MAX_CLIENTS:,}; "
            "divide by a column with fewer values"
        )
    if settings.num_clients not in (None, number):
        names = "" if assignment.names is None else f" ({quoted(assignment.names[:10])})"
        raise DataError(
            f"data.partition.num_clients is {settings.num_clients}, and scheme {settings.scheme} "
            f"gives {number} clients{names}; remove num_clients, or set it to {number}"
        )


def _check_sizes(parts: Sequence[Indices], names: Sequence[str] | None, least: int) -> None:
    small = [client for client, rows in enumerate(parts) if len(rows) < least]
    if not small:
        return
    first = small[0]
    name = first if names is None else repr(names[first])
    others = f" ({len(small)} of {len(parts)} clients have so few)" if small[1:] else ""
    raise DataError(
        f"data.partition: client {name} has {len(parts[first])} training examples, fewer "
        f"than min_examples {least}{others}; lower min_examples, or merge or remove such clients"
    )
