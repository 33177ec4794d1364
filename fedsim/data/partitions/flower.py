"""Partitioners of flwr-datasets, an extra, on the row numbers of any dataset."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.plugins import plugin_calls
from fedsim.core.streams import Purpose, stream
from fedsim.data.examples import DataError
from fedsim.data.names import closest_name
from fedsim.data.partitions.assignment import LEFT_OUT, Assignment
from fedsim.data.partitions.settings import TARGET_NAMES, FlwrPartition

_ROW = "fedsim_row"
_ARRAYS = ("distribution_array",)  # arguments that are numpy arrays, written as lists


def assign_by_flower(
    targets: NDArray[Any],
    groups: Mapping[str, Sequence[str]],
    settings: FlwrPartition,
    *,
    seed: int,
) -> Assignment:
    """Return the clients that a partitioner gives the training examples.

    The rows are shuffled first, as `FederatedDataset` of flwr-datasets does.

    Args:
        targets: of the n training examples; the columns `label` and `target` of the partitioner.
        groups: further columns by name, n values each.
        settings: the partitioner's class and arguments.
        seed: the experiment's seed.

    Raises:
        DataError: flwr-datasets is missing, or its partitioner refuses the arguments or the data.
    """
    where = f"data.partition: {settings.scheme} of flwr-datasets"
    if find_spec("flwr_datasets") is None:
        raise DataError(f"{where} is not installed; pip install 'fedsim-dp[datasets]'")
    kind = getattr(import_module("flwr_datasets.partitioner"), settings.scheme)
    args = _arguments(kind, settings, seed)
    order = stream(seed, Purpose.PARTITION).permutation(len(targets))
    labels = targets if targets.ndim == 1 else np.arange(len(targets))
    columns = {name: np.asarray(values)[order] for name, values in groups.items()}
    columns |= {name: labels[order] for name in TARGET_NAMES if name not in columns}
    clients = np.full(len(targets), LEFT_OUT)
    # Its progress bars would write between the lines of a run.
    with (
        plugin_calls(f"{where} failed", raises=DataError, fix="check args"),
        redirect_stderr(StringIO()),
    ):
        partitioner = kind(**args)
        partitioner.dataset = import_module("datasets").Dataset.from_dict({_ROW: order, **columns})
        number = partitioner.num_partitions
        for client in range(number):
            rows = np.asarray(partitioner.load_partition(client)[_ROW], np.int64)
            if (clients[rows] != LEFT_OUT).any():
                raise DataError(f"{where}: an example is on two clients; check args")
            clients[rows] = client
        ids = getattr(partitioner, "partition_id_to_natural_id", None)
    names = None
    if isinstance(ids, Mapping) and len(ids) == number:
        names = tuple(str(ids[client]) for client in range(number))
    return Assignment(clients, names, number)


def _arguments(kind: type, settings: FlwrPartition, seed: int) -> dict[str, Any]:
    """Return the arguments of the class, with the experiment's number of clients and seed."""
    known = list(inspect.signature(kind).parameters)
    for name in settings.args:
        if name not in known:
            close = closest_name(name, known)
            hint = f"did you mean {close!r}?" if close else f"it takes {', '.join(known)}"
            raise DataError(f"data.partition.args: {settings.scheme} has no {name!r}; {hint}")
    own: dict[str, Any] = {"seed": seed % 2**32}
    if settings.num_clients is not None:
        own["num_partitions"] = settings.num_clients
    args = {name: value for name, value in own.items() if name in known} | settings.args
    if "num_partitions" in known and "num_partitions" not in args:
        raise DataError("data.partition.num_clients: missing; number of clients")
    required = [
        name
        for name, one in inspect.signature(kind).parameters.items()
        if one.default is inspect.Parameter.empty and name not in args
    ]
    if required:
        raise DataError(
            f"data.partition.args: {settings.scheme} needs {', '.join(required)}; partition_by is "
            f"{' or '.join(TARGET_NAMES)}, or a column of a table"
        )
    return {name: np.array(one) if name in _ARRAYS else one for name, one in args.items()}
