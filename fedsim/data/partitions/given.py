"""Partitions by a user's function or by a partitioner of flwr-datasets.

The function or the partitioner decides which client has each training example.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import raised_as
from fedsim.core.names import closest_hint
from fedsim.core.plugins import plugin_calls, resolve
from fedsim.core.streams import Purpose, stream
from fedsim.data.examples import DataError, Examples
from fedsim.data.settings import TARGET_NAMES, FlwrPartition, FunctionPartition

LEFT_OUT = -1
"""The client number of an example that is on no client."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """The client number of each training example, and the clients' names.

    Attributes:
        clients: client number (from 0) of each example, int64 (n,). The value is `LEFT_OUT` for an
            example that no client has.
        names: public name of each client; None if clients have only numbers.
        num_clients: number of clients, including those without examples.
    """

    clients: NDArray[np.int64]
    names: tuple[str, ...] | None
    num_clients: int

    @classmethod
    def by_name(cls, values: Sequence[str], *, order: bool = True) -> Self:
        """Return the assignment of examples to clients, given the client name of each example.

        Args:
            values: name of the client of each example.
            order: whether to number clients by sorted names (as numbers if all names are numbers).
                If not, clients are numbered by first appearance.
        """
        names = list(dict.fromkeys(values))
        if order:
            are_numbers = all(re.fullmatch(r"[+-]?\d{1,99}", name) for name in names)
            names.sort(key=(lambda name: (int(name), name)) if are_numbers else str)
        numbers = {name: number for number, name in enumerate(names)}
        clients = np.array([numbers[value] for value in values], np.int64)
        return cls(clients, tuple(names), len(names))


_WHAT = "data.partition.scheme"
_RETURNS = (
    "the client of each example (whole numbers from 0, or names), {client: row numbers}, or a list "
    "of each client's row numbers"
)


def assign_by_function(
    train: Examples, settings: FunctionPartition, *, seed: int, base: Path
) -> Assignment:
    """Assign the training examples to clients by a user's function.

    The function is called as `function(features, targets, seed=seed, **args)`. It also gets
    `num_clients` if the experiment sets it and the function has that parameter. (The copy of the
    experiment file in a run's directory always sets it.)

    Args:
        train: the training examples.
        settings: the function's reference and arguments.
        seed: the experiment's seed; a `seed` in `args` replaces it.
        base: the directory to which relative paths refer.

    Raises:
        DataError: the function cannot be loaded, fails, or does not return one client for each
            example.
    """
    where = f"{_WHAT} {settings.scheme!r}"
    with raised_as(DataError):
        function = resolve(settings.scheme, base=base, setting=_WHAT)
    args = {"seed": seed, **settings.args}
    if settings.num_clients is not None and _takes(function, "num_clients"):
        args = {"num_clients": settings.num_clients, **args}
    fix = f"it is called with features, targets, {', '.join(args)}"
    with plugin_calls(f"{where}: failed", raises=DataError, fix=fix):
        result = function(train.features.copy(), train.targets.copy(), **args)
    fix = f"return {_RETURNS}"
    with (
        raised_as(DataError, f"{where}: "),
        plugin_calls("its result failed", raises=DataError, fix=fix),
    ):
        if isinstance(result, list | tuple) and all(np.ndim(rows) == 1 for rows in result):
            result = dict(enumerate(result))
        values = _of_mapping(result, len(train)) if isinstance(result, Mapping) else result
        return _of_values(np.asarray(values), len(train), settings.num_clients)


def _takes(function: Any, name: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions in C have no signature
        return True
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _of_values(values: NDArray[Any], n: int, num_clients: int | None) -> Assignment:
    """Return the assignment by an array of client numbers or names (n,)."""
    if values.shape != (n,):
        raise DataError(f"must return {_RETURNS}, for {n} examples; got shape {values.shape}")
    if values.dtype.kind in "iu":
        clients = values.astype(np.int64)
        if clients.min(initial=0) < LEFT_OUT:
            raise DataError(f"clients have numbers from 0, got {clients.min()}")
        number = int(clients.max(initial=LEFT_OUT)) + 1
        return Assignment(clients, None, max(number, num_clients or 0))
    if not all(isinstance(value, str) for value in values.tolist()):
        raise DataError(f"must return {_RETURNS}; got an array of {values.dtype}")
    return Assignment.by_name([str(value) for value in values])


def _of_mapping(rows_of_client: Mapping[Any, Any], n: int) -> list[Any]:
    """Return the client of each example, from the row numbers of each client."""
    names = not rows_of_client or any(isinstance(client, str) for client in rows_of_client)
    clients: list[Any] = [None] * n
    for client, rows in rows_of_client.items():
        for row in np.asarray(rows, dtype=np.int64).tolist():
            if not 0 <= row < n:
                raise DataError(f"row numbers are from 0 to {n - 1}, got {row}")
            if clients[row] is not None:
                raise DataError(f"row {row} is on the clients {clients[row]!r} and {client!r}")
            clients[row] = client
    if None in clients and names:
        raise DataError(f"row {clients.index(None)} is on no client; give every row a client")
    return [LEFT_OUT if client is None else client for client in clients]


_ROW = "fedsim_row"
_ARRAYS = ("distribution_array",)  # arguments that are numpy arrays, written as lists


def assign_by_flower(
    targets: NDArray[Any],
    groups: Mapping[str, Sequence[str]],
    settings: FlwrPartition,
    *,
    seed: int,
) -> Assignment:
    """Assign the training examples to clients by a partitioner of flwr-datasets.

    The rows are shuffled first, as in `FederatedDataset` of flwr-datasets.

    Args:
        targets: targets of the n training examples, which the partitioner sees as columns `label`
            and `target`.
        groups: further columns of n values, by name.
        settings: the partitioner's class and arguments.
        seed: the experiment's seed.

    Raises:
        DataError: flwr-datasets is missing, or the partitioner refuses the arguments or the data.
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
    # The progress bars of flwr-datasets would write between the lines of a run.
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
    """Return the partitioner's arguments, with the experiment's number of clients and seed."""
    parameters = inspect.signature(kind).parameters
    known = list(parameters)
    for name in settings.args:
        if name not in known:
            hint = closest_hint(name, known, f"it takes {', '.join(known)}")
            raise DataError(f"data.partition.args: {settings.scheme} has no {name!r}; {hint}")
    defaults: dict[str, Any] = {"seed": seed % 2**32}
    if settings.num_clients is not None:
        defaults["num_partitions"] = settings.num_clients
    args = {name: value for name, value in defaults.items() if name in known} | settings.args
    if "num_partitions" in known and "num_partitions" not in args:
        raise DataError("data.partition.num_clients: missing; number of clients")
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in args
    ]
    if required:
        raise DataError(
            f"data.partition.args: {settings.scheme} needs {', '.join(required)}; partition_by is "
            f"{' or '.join(TARGET_NAMES)}, or a column of a table"
        )
    return {name: np.array(value) if name in _ARRAYS else value for name, value in args.items()}
