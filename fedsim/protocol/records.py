"""Look-up in Flower's records."""

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord, MetricRecord)


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
