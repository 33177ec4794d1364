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
    """An update that must not be averaged in; it names the array and what is wrong with it."""


def check_update(update: Arrays, reference: Arrays) -> None:
    """Check that an update has the layout of the global model and only finite numbers.

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
    """Weighted mean of the updates of `order`'s clients, independent of their arrival.

    Every client of `order` is either added or skipped, once. The result has the dtypes of
    `reference`; integer arrays (counters such as `num_batches_tracked`) are rounded.
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
        """Take the update of `client` with a weight ≥ 0.

        Raises:
            InvalidUpdateError: wrong layout or non-finite values (the client is then skipped).
            ValueError: `client` is not expected, or came before.
        """
        try:
            check_update(update, self._reference)
        except InvalidUpdateError:
            self.skip(client)
            raise
        self._arrive(client, (update, weight))

    def skip(self, client: int) -> None:
        """Go on without `client`, which failed or stayed out."""
        self._arrive(client, None)

    def result(self) -> dict[str, np.ndarray] | None:
        """Return the mean, or None when nobody with a positive weight was added.

        Raises:
            ValueError: a client of the order neither arrived nor was skipped.
        """
        if self._position < len(self._order):
            raise ValueError(f"clients {self._order[self._position :]} neither added nor skipped")
        if self._sums is None or self._weight <= 0:
            return None
        mean = {name: total / self._weight for name, total in self._sums.items()}
        return {name: _cast(value, self._reference[name].dtype) for name, value in mean.items()}

    def _arrive(self, client: int, entry: tuple[Arrays, float] | None) -> None:
        if client not in self._expected:
            raise ValueError(f"client {client} is not expected, or came before")
        self._expected.remove(client)
        self._waiting[client] = entry
        while self._position < len(self._order):
            turn = self._order[self._position]
            if turn not in self._waiting:
                return
            self._accumulate(self._waiting.pop(turn))
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
    """Tell whether no value is NaN or infinite; most often by one product, which spreads either."""
    if values.dtype.kind == "f" and math.isfinite(np.vdot(values, values)):
        return True
    return bool(np.isfinite(values).all())  # large numbers have no finite square


def _cast(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if np.issubdtype(dtype, np.floating):
        return value.astype(dtype)
    return np.rint(value).astype(dtype)
