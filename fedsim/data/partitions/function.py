"""Partitions by a function of the user."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.plugins import PluginError, plugin_calls, resolve
from fedsim.data.examples import DataError, Examples
from fedsim.data.partitions.assignment import LEFT_OUT, Assignment
from fedsim.data.partitions.settings import FunctionPartition

_WHAT = "data.partition.scheme"
_RETURNS = (
    "the client of each example (whole numbers from 0, or names), {client: row numbers}, or a list "
    "of each client's row numbers"
)


def assign_by_function(
    train: Examples, settings: FunctionPartition, *, seed: int, base: Path
) -> Assignment:
    """Return the clients that a function gives the training examples.

    It is called as `function(features, targets, seed=seed, **args)`, with `num_clients` where the
    experiment sets it and the function takes it: the file of a run names the number that it found.

    Args:
        train: the training examples.
        settings: the function's reference and arguments.
        seed: the experiment's seed; a `seed` in `args` replaces it.
        base: the directory in which relative paths start.

    Raises:
        DataError: the function cannot be loaded, fails, or returns something else.
    """
    where = f"{_WHAT} {settings.scheme!r}"
    try:
        function = resolve(settings.scheme, base=base, what=_WHAT)
    except PluginError as error:
        raise DataError(str(error)) from error
    args = {"seed": seed, **settings.args}
    if settings.num_clients is not None and _takes(function, "num_clients"):
        args = {"num_clients": settings.num_clients, **args}
    fix = f"it is called with features, targets, {', '.join(args)}"
    with plugin_calls(f"{where}: failed", raises=DataError, fix=fix):
        found = function(train.features.copy(), train.targets.copy(), **args)
    try:
        with plugin_calls("its result failed", raises=DataError, fix=f"return {_RETURNS}"):
            if isinstance(found, list | tuple) and all(np.ndim(one) == 1 for one in found):
                found = dict(enumerate(found))
            values = _of_mapping(found, len(train)) if isinstance(found, Mapping) else found
            return _of_values(np.asarray(values), len(train), settings.num_clients)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _takes(function: Any, name: str) -> bool:
    """Whether a function can be called with an argument of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of C have none
        return True
    return name in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )


def _of_values(values: NDArray[Any], n: int, num_clients: int | None) -> Assignment:
    """Return the clients of an array of numbers or names (n,)."""
    if values.shape != (n,):
        raise DataError(f"must return {_RETURNS}, for {n} examples; got shape {values.shape}")
    if values.dtype.kind in "iu":
        clients = values.astype(np.int64)
        if clients.min(initial=0) < LEFT_OUT:
            raise DataError(f"clients have numbers from 0, got {clients.min()}")
        found = int(clients.max(initial=LEFT_OUT)) + 1
        return Assignment(clients, None, max(found, num_clients or 0))
    if not all(isinstance(value, str) for value in values.tolist()):
        raise DataError(f"must return {_RETURNS}; got an array of {values.dtype}")
    return Assignment.by_name([str(value) for value in values])


def _of_mapping(found: Mapping[Any, Any], n: int) -> list[Any]:
    """Return the client of each example, from the examples of each client."""
    names = all(isinstance(client, str) for client in found)
    clients: list[Any] = [None] * n
    for client, rows in found.items():
        for row in np.asarray(rows, dtype=np.int64).tolist():
            if not 0 <= row < n:
                raise DataError(f"row numbers are from 0 to {n - 1}, got {row}")
            if clients[row] is not None:
                raise DataError(f"row {row} is on the clients {clients[row]!r} and {client!r}")
            clients[row] = client
    if None in clients and names:
        raise DataError(f"row {clients.index(None)} is on no client; give every row a client")
    return [LEFT_OUT if client is None else client for client in clients]
