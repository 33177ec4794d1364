"""Flower's records, filled at once.

Flower checks each value as it is set, which takes as long as a step of a small model's client. What
fedsim puts into records is checked here in one look; anything else is left to Flower, which takes
it or says what is wrong with it.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)

_NUMBERS = frozenset((int, float))
_SCALARS = frozenset((int, float, str, bytes, bool))
_RECORDS = frozenset((ArrayRecord, ConfigRecord, MetricRecord))


def config_record(fields: Mapping[str, Any]) -> ConfigRecord:
    """Return a record of settings.

    Raises:
        TypeError: Flower has no place for a value.
    """
    return _filled(ConfigRecord(), fields, _SCALARS)


def metric_record(fields: Mapping[str, Any]) -> MetricRecord:
    """Return a record of numbers.

    Raises:
        TypeError: Flower has no place for a value.
    """
    return _filled(MetricRecord(), fields, _NUMBERS)


def array_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return a record of arrays, in their order.

    Raises:
        TypeError: something is no array of Flower's.
    """
    kinds = frozenset(map(type, arrays.values()))
    ours = kinds if all(issubclass(kind, Array) for kind in kinds) else frozenset()
    return _filled(ArrayRecord(), arrays, ours)


def record_dict(records: Mapping[str, Any]) -> RecordDict:
    """Return the content of a message.

    Raises:
        TypeError: something is no record of Flower's.
    """
    return _filled(RecordDict(), records, _RECORDS)


def record_of(content: RecordDict, name: str, kind: type[R]) -> R | None:
    """Return a record by name; None if there is none of that type.

    Flower's own views copy all records of a type each time. Its `get` raises and catches an error
    where the name is missing, which is the common case.

    Args:
        content: of a message, or a client's state.
        name: of the record.
        kind: its type.
    """
    if name not in content:
        return None
    record = content[name]
    return record if isinstance(record, kind) else None


def _filled(record: R, content: Mapping[str, Any], types: frozenset[type]) -> R:
    """Return an empty record with its content, fast where that is of the types given."""
    inside = vars(record).get("_data")  # where Flower 1.40 and 1.41 keep it
    if type(inside) is dict and types.issuperset(map(type, content.values())):
        inside.update(content)
    else:
        for name, value in content.items():
            record[name] = value
    return record
