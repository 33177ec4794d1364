"""Federated averaging as a stream: one running float64 sum, in a fixed order.

Floating-point addition is not associative, so an average in order of arrival differs from run to
run. `OrderedMean` adds the updates in the order fixed before the round, and holds back only those
that arrive before their turn.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedsim.core.errors import FedsimError

Arrays = Mapping[str, np.ndarray]


class InvalidUpdateError(FedsimError, ValueError):
    """An update that must not be averaged; the message names the array and the fault."""


def check_update(update: Arrays, reference: Arrays) -> None:
    """Check that an update has the layout of the global model and only finite numbers.

    Args:
        update: arrays by name, in the order of the model.
        reference: the global model.

    Raises:
        InvalidUpdateError: names, dtype or shape differ, or a value is NaN or infinite.
    """
    if list(update) != list(reference):
        missing = [name for name in reference if name not in update]
        extra = [name for name in update if name not in reference]
        raise InvalidUpdateError(f"arrays differ: missing {missing}, unexpected {extra}")
    for name, value in update.items():
        expected = reference[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise InvalidUpdateError(
                f"array {name!r} must be {expected.dtype}{list(expected.shape)}, "
                f"got {value.dtype}{list(value.shape)}"
            )
        if not _all_finite(value):
            raise InvalidUpdateError(f"array {name!r} has NaN or infinite values")


class OrderedMean:
    """Weighted mean of client updates, independent of their order of arrival.

    Each client of `order` is added or skipped, once. The result has the dtypes of `reference`;
    integer arrays (counters such as `num_batches_tracked`) are rounded.

    Args:
        order: the clients of the round, in the order of the sum.
        reference: the global model.
    """

    def __init__(self, order: Sequence[int], reference: Arrays) -> None:
        self._order = list(order)
        self._expected = set(order)
        self._reference = reference
        self._position = 0
        self._waiting: dict[int, tuple[Arrays, float] | None] = {}
        self._sums: dict[str, np.ndarray] | None = None
        self._product: dict[str, np.ndarray] = {}
        self._weight = 0.0

    def add(self, client: int, update: Arrays, weight: float) -> None:
        """Add the update of a client.

        Args:
            client: a client of the order.
            update: its model, arrays by name.
            weight: ≥ 0.

        Raises:
            InvalidUpdateError: wrong layout or non-finite values (the client is then skipped).
            ValueError: the client is not in the order, or was added or skipped before.
        """
        try:
            check_update(update, self._reference)
        except InvalidUpdateError:
            self.skip(client)
            raise
        self._arrive(client, (update, weight))

    def skip(self, client: int) -> None:
        """Leave out a client that failed or did not reply."""
        self._arrive(client, None)

    def result(self) -> dict[str, np.ndarray] | None:
        """Return the mean, or None when no client with a positive weight was added.

        Raises:
            ValueError: a client of the order was neither added nor skipped.
        """
        if self._position < len(self._order):
            raise ValueError(f"clients {self._order[self._position :]} neither added nor skipped")
        if self._sums is None or self._weight <= 0:
            return None
        mean = {name: total / self._weight for name, total in self._sums.items()}
        return {name: _cast(value, self._reference[name].dtype) for name, value in mean.items()}

    def _arrive(self, client: int, entry: tuple[Arrays, float] | None) -> None:
        if client not in self._expected:
            raise ValueError(f"client {client} is not in the order, or was added or skipped before")
        self._expected.remove(client)
        self._waiting[client] = entry
        while self._position < len(self._order):
            client = self._order[self._position]
            if client not in self._waiting:
                return
            self._accumulate(self._waiting.pop(client))
            self._position += 1

    def _accumulate(self, entry: tuple[Arrays, float] | None) -> None:
        if entry is None:
            return
        update, weight = entry
        if self._sums is None:
            self._sums = {
                name: np.zeros(value.shape, np.float64) for name, value in self._reference.items()
            }
            self._product = {name: np.empty_like(total) for name, total in self._sums.items()}
        for name, total in self._sums.items():
            if weight == 1.0:
                total += update[name]
            else:
                product = self._product[name]
                total += np.multiply(update[name], weight, out=product, dtype=np.float64)
        self._weight += weight


def _all_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; one product finds that out for most arrays."""
    if values.dtype.kind == "f" and math.isfinite(np.vdot(values, values)):
        return True
    return bool(np.isfinite(values).all())  # large numbers have no finite square


def _cast(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    rounded = value if np.issubdtype(dtype, np.floating) else np.rint(value)
    return np.asarray(rounded, dtype=dtype)  # a mean without dimensions is no array
