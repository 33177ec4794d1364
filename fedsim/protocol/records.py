"""Fast construction of Flower's records.

Flower checks each value as it is set, which takes as long as a training step of a small model. Here
the types of all values are checked at once. A record with other types goes through Flower's own
checks, which accept it or raise.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)

_NUMBERS = frozenset((int, float))
_SCALARS = frozenset((int, float, str, bytes, bool))
_RECORDS = frozenset((ArrayRecord, ConfigRecord, MetricRecord))


def config_record(fields: Mapping[str, Any]) -> ConfigRecord:
    """Return a record of plain values.

    Raises:
        TypeError: a value has a type that Flower's record does not hold.
    """
    return _fill(ConfigRecord(), fields, _SCALARS)


def metric_record(fields: Mapping[str, Any]) -> MetricRecord:
    """Return a record of numbers.

    Raises:
        TypeError: a value has a type that Flower's record does not hold.
    """
    return _fill(MetricRecord(), fields, _NUMBERS)


def array_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return a record of arrays, in the given order.

    Raises:
        TypeError: a value is not a Flower array.
    """
    kinds = frozenset(map(type, arrays.values()))
    ours = kinds if all(issubclass(kind, Array) for kind in kinds) else frozenset()
    return _fill(ArrayRecord(), arrays, ours)


def record_dict(records: Mapping[str, Any]) -> RecordDict:
    """Return the content of a message.

    Raises:
        TypeError: a value is not a Flower record.
    """
    return _fill(RecordDict(), records, _RECORDS)


def record_of(content: RecordDict, name: str, kind: type[_Record]) -> _Record | None:
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


def _fill(record: _Record, content: Mapping[str, Any], types: frozenset[type]) -> _Record:
    """Fill an empty record and return it; fast if all values are of the given types."""
    inside = vars(record).get("_data")  # where Flower 1.40 and 1.41 keep it
    if type(inside) is dict and types.issuperset(map(type, content.values())):
        inside.update(content)
    else:
        for name, value in content.items():
            record[name] = value
    return record
