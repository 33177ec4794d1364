"""Messages as records: plain fields on one side, arrays on the other, strictly checked.

A message becomes `{"kind", "version", field: bool | int | str | bytes | list of one of them}` and
`{field: array}`, which any transport of typed records carries as they are.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from fedsim.secagg.errors import (
    SecureAggregationError,
    ShareMismatchError,
    WireError,
    refusal,
)
from fedsim.secagg.messages import Refusal

VERSION = 2
Scalar = bool | int | str | bytes
Config = dict[str, Scalar | list[bool] | list[int] | list[str] | list[bytes]]
T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """A message ready for the transport."""

    config: Config
    arrays: dict[str, NDArray]


def to_record(message: object) -> Record:
    """Return the record of a message (a dataclass of `messages`, or a state built like them)."""
    config: Config = {"kind": type(message).__name__, "version": VERSION}
    arrays: dict[str, NDArray] = {}
    for name, kind in _fields(type(message)).items():
        value = getattr(message, name)
        if kind is np.ndarray:
            arrays[name] = value
        else:
            config[name] = list(value) if isinstance(value, tuple) else value
    return Record(config, arrays)


def from_record(
    kind: type[T], config: Mapping[str, object], arrays: Mapping[str, NDArray] | None = None
) -> T:
    """Return the message in a record.

    Raises:
        SecureAggregationError: the other party refused; its own error, by name.
        WireError: another kind or version, a field missing, unknown or of a wrong type.
    """
    if config.get("kind") == Refusal.__name__ and kind is not Refusal:
        no = from_record(Refusal, config)
        raise refusal(no.error, no.message)
    if config.get("kind") != kind.__name__ or config.get("version") != VERSION:
        raise WireError(
            f"expected {kind.__name__} version {VERSION}, got {config.get('kind')} version "
            f"{config.get('version')}; run the same fedsim everywhere"
        )
    arrays = arrays or {}
    expected = _fields(kind)
    in_arrays = {name for name, what in expected.items() if what is np.ndarray}
    in_config = {*expected, "kind", "version"} - in_arrays
    extra = [name for name in config if name not in in_config]
    extra += [name for name in arrays if name not in in_arrays]
    if extra:
        raise WireError(f"{kind.__name__} has unknown fields {extra}")
    values: dict[str, Any] = {}
    for name, what in expected.items():
        source = arrays if what is np.ndarray else config
        if name not in source:
            raise WireError(f"{kind.__name__} lacks the field {name!r}")
        values[name] = _checked(f"{kind.__name__}.{name}", source[name], what)
    return kind(**values)


def refuse(error: SecureAggregationError) -> Refusal:
    """Return the message that tells another party of an error."""
    return Refusal(error=type(error).__name__, message=str(error))


def _fields(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: _plain(hints[each.name]) for each in fields(kind)}


def _plain(hint: Any) -> Any:
    """Return np.ndarray for every kind of array, and other types as they are."""
    branches = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    return np.ndarray if get_origin(branches[0]) is np.ndarray else hint


def _checked(name: str, value: object, kind: Any) -> object:
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
