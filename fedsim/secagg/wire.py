"""The wire format of secure aggregation messages: records of plain fields and of arrays.

A message becomes two records, which are strictly checked on receipt:
`{"kind", "version", field: bool | int | str | bytes | list of one type}` and `{field: array}`. Any
transport of typed records can carry them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from fedsim.secagg.errors import (
    SecureAggregationError,
    ShareMismatchError,
    WireError,
    error_by_name,
)
from fedsim.secagg.messages import Refusal

WIRE_VERSION = 3
_MAX_REFUSAL = 2000  # characters of another party's error that are passed on
_Scalar = bool | int | str | bytes
Config = dict[str, _Scalar | list[bool] | list[int] | list[str] | list[bytes]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class WireRecord:
    """A secure aggregation message in the wire format: its plain fields and its arrays."""

    config: Config
    arrays: dict[str, NDArray]


def to_record(message: object) -> WireRecord:
    """Return the wire record of a message, or of a party's saved state with such fields."""
    config: Config = {"kind": type(message).__name__, "version": WIRE_VERSION}
    arrays: dict[str, NDArray] = {}
    for name, kind in _fields(type(message)).items():
        value = getattr(message, name)
        if kind is np.ndarray:
            arrays[name] = value
        else:
            config[name] = list(value) if isinstance(value, tuple) else value
    return WireRecord(config, arrays)


def from_record(
    kind: type[_T], config: Mapping[str, object], arrays: Mapping[str, NDArray] | None = None
) -> _T:
    """Return the message that a wire record holds, after checking it.

    Args:
        kind: the class of the expected message.
        config: the plain fields by name.
        arrays: the arrays by field name; None for no arrays.

    Raises:
        SecureAggregationError: the record is a refusal; the error of the other party is raised.
        WireError: the message is of another kind or version, or a field is missing, unknown or of a
            wrong type.
    """
    if config.get("kind") == Refusal.__name__ and kind is not Refusal:
        received = from_record(Refusal, config)
        raise error_by_name(received.error, received.message[:_MAX_REFUSAL])
    if config.get("kind") != kind.__name__ or config.get("version") != WIRE_VERSION:
        raise WireError(
            f"expected {kind.__name__} version {WIRE_VERSION}, got {config.get('kind')} version "
            f"{config.get('version')}; run the same fedsim everywhere"
        )
    arrays = arrays or {}
    expected = _fields(kind)
    in_arrays = {name for name, field_kind in expected.items() if field_kind is np.ndarray}
    in_config = {*expected, "kind", "version"} - in_arrays
    extra = [name for name in config if name not in in_config]
    extra += [name for name in arrays if name not in in_arrays]
    if extra:
        raise WireError(f"{kind.__name__} has unknown fields {extra}")
    values: dict[str, Any] = {}
    for name, field_kind in expected.items():
        source = arrays if field_kind is np.ndarray else config
        if name not in source:
            raise WireError(f"{kind.__name__} lacks the field {name!r}")
        values[name] = _check_value(f"{kind.__name__}.{name}", source[name], field_kind)
    return kind(**values)


def to_refusal(error: SecureAggregationError) -> Refusal:
    """Return the message that reports an error of this party to another party."""
    return Refusal(error=type(error).__name__, message=str(error))


def _fields(kind: type) -> dict[str, Any]:
    """Return the types of a message's fields, np.ndarray for every array type."""
    hints = get_type_hints(kind)
    types = {field.name: hints[field.name] for field in fields(kind)}
    return {name: np.ndarray if get_origin(t) is np.ndarray else t for name, t in types.items()}


def _check_value(name: str, value: object, kind: Any) -> object:
    if kind is np.ndarray:
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind != "u":
            raise ShareMismatchError(f"{name} must be a one-dimensional array of ring elements")
        return value
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if not isinstance(value, (list, tuple)) or any(type(item) is not inner for item in value):
            raise WireError(f"{name} must be a list of {inner.__name__}")
        return tuple(value)
    if type(value) is not kind:
        raise WireError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
    return value
