"""The layout of a model: the place of each tensor in the flat vector of an upload."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedsim.secagg.errors import LayoutMismatchError

NamedArrays = Mapping[str, NDArray]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its name, its shape and the name of its type ("float32")."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of values; 1 for a scalar."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class TensorLayout:
    """Names, shapes, types and order of the tensors of a model.

    Guarantee: arrays pass only with exactly this layout; nothing is broadcast, reordered or cast.
    Byte order and strides do not count: they change the bytes of a number, not the number.
    """

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def from_arrays(cls, arrays: NamedArrays) -> Self:
        """Return the layout of named arrays.

        Raises:
            LayoutMismatchError: a type other than float, integer or boolean.
        """
        for name, value in arrays.items():
            if value.dtype.kind not in "fiub":
                raise LayoutMismatchError(
                    f"array {name!r} has the type {value.dtype}, which has no sum; "
                    "only floats, integers and booleans can be aggregated"
                )
        return cls(
            tuple(
                TensorSpec(name, tuple(value.shape), value.dtype.name)
                for name, value in arrays.items()
            )
        )

    @cached_property
    def size(self) -> int:
        """Number of coordinates d."""
        return sum(spec.size for spec in self.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names, shapes, types and order, in hex."""
        fields = [[spec.name, list(spec.shape), spec.dtype] for spec in self.tensors]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    def check(self, arrays: NamedArrays, *, client: int | None = None) -> None:
        """Check that arrays have this layout.

        Args:
            arrays: tensors by name.
            client: client in error messages.

        Raises:
            LayoutMismatchError: another layout; the message names the first different tensor.
        """
        got = TensorLayout.from_arrays(arrays)
        if got == self:
            return
        for expected, found in zip(self.tensors, got.tensors, strict=False):
            if expected != found:
                raise self._mismatch(str(expected), str(found), got, client)
        longer = max(self, got, key=lambda layout: len(layout.tensors))
        extra = str(longer.tensors[min(len(self.tensors), len(got.tensors))])
        sides = (extra, "nothing") if longer is self else ("nothing", extra)
        raise self._mismatch(*sides, got, client)

    def slices(self) -> Iterator[tuple[TensorSpec, slice]]:
        """Yield each tensor with its slice of the vector."""
        start = 0
        for spec in self.tensors:
            yield spec, slice(start, start + spec.size)
            start += spec.size

    def unflatten(
        self, vector: NDArray[np.float64], *, plus: NamedArrays | None = None
    ) -> dict[str, NDArray]:
        """Return the tensors of a flat vector, each cast to its type; integers are rounded.

        Args:
            vector: float64 (d,).
            plus: tensors of this layout, added in float64 before the cast; None adds nothing.

        Raises:
            LayoutMismatchError: not d values, or `plus` has another layout.
        """
        if vector.shape != (self.size,):
            raise LayoutMismatchError(
                f"the vector must have {self.size} values, got shape {vector.shape}"
            )
        if plus is not None:
            self.check(plus)
        result: dict[str, NDArray] = {}
        for spec, where in self.slices():
            value = vector[where].reshape(spec.shape)
            if plus is not None:
                value = value + plus[spec.name].astype(np.float64)
            whole = np.dtype(spec.dtype).kind != "f"
            result[spec.name] = (np.rint(value) if whole else value).astype(spec.dtype)
        return result

    def _mismatch(
        self, expected: str, found: str, got: "TensorLayout", client: int | None
    ) -> LayoutMismatchError:
        return LayoutMismatchError(
            f"the arrays differ from the announced layout: expected {expected}, got {found}; "
            "all parties must build the same model",
            client=client,
            expected=self.digest,
            got=got.digest,
        )
