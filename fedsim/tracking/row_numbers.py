"""The numbers of a line of `rounds.jsonl`, as flat columns for trackers and tables."""

from collections.abc import Iterator, Mapping
from typing import Any

_SCORES = ("test_", "clients_", "train_")


def row_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return every number of a line by its name; values that are no number are left out.

    A mapping gives `key.inner`, scores by class `test_recall_per_class.0`, and any other list, such
    as `participants`, its length.
    """
    return dict(_numbers(row))


def _numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, list) and name.startswith(_SCORES):
            yield from _numbers({str(place): one for place, one in enumerate(value)}, f"{name}.")
        elif isinstance(value, list):
            yield name, len(value)
        elif isinstance(value, int | float):
            yield name, value
