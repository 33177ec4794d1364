"""The class of examples (features and targets as checked arrays), used everywhere in fedsim."""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import InputError

_CHUNK_VALUES = 1 << 22


class DataError(InputError):
    """Raised if the data do not fit the experiment; the message is one line with the fix."""


class ExampleTransform(Protocol):
    """A fixed function that changes the features of each example, applied to many examples at once.

    Guarantee: the result of an example does not depend on other examples.
    """

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one example's features after the transform."""
        ...

    def __call__(self, examples: NDArray[np.float32] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the features (n, *output_shape) of examples (n, *input_shape)."""
        ...


@dataclass(frozen=True, eq=False)
class Examples:
    """Features and targets of n ≥ 0 examples, as checked arrays.

    Attributes:
        features: finite float32 (n, ...), or int64 (n, ...) for tokens of an embedding.
        targets: int64 (n,) for classes; finite float32 (n,) or (n, k) for regression and for
            multi-label classification.

    Raises:
        DataError: on creation, if an array has another type or shape, or is not finite.
    """

    features: NDArray[np.float32] | NDArray[np.int64]
    targets: NDArray[np.int64] | NDArray[np.float32]

    def __post_init__(self) -> None:
        _check_arrays(self.features, self.targets)
        if len(self.features) != len(self.targets):
            raise DataError(
                f"features and targets must have one row per example, got {len(self.features)} "
                f"rows of features and {len(self.targets)} targets"
            )
        for name, array in (("features", self.features), ("targets", self.targets)):
            _check_finite(name, array)

    def __len__(self) -> int:
        return len(self.features)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example's features."""
        return self.features.shape[1:]

    @property
    def has_classes(self) -> bool:
        """Whether the targets are class numbers, one per example."""
        return self.targets.dtype == np.int64

    @property
    def is_in_memory(self) -> bool:
        """Whether the features are in memory, not in a memory-mapped file."""
        part: object = self.features
        while isinstance(part, np.ndarray) and not isinstance(part, np.memmap):
            part = part.base
        return not isinstance(part, np.memmap)

    def transformed(self, transform: ExampleTransform | None) -> Self:
        """Return the examples with transformed features, in memory.

        If `transform` is None, the result is `self`.
        """
        if transform is None:
            return self
        return type(self)(transform(self.features), self.targets)

    def take(self, indices: NDArray[np.integer]) -> Self:
        """Return a copy of the examples at `indices`, in that order, with values checked again."""
        return type(self)(self.features[indices], self.targets[indices])

    def rows(self, indices: NDArray[np.integer] | slice) -> Self:
        """Return the examples at `indices`: a copy for an index array, a view for a slice.

        Unlike `take`, this does not check the values again.
        """
        examples = object.__new__(type(self))
        object.__setattr__(examples, "features", self.features[indices])
        object.__setattr__(examples, "targets", self.targets[indices])
        return examples


def _check_arrays(features: object, targets: object) -> None:
    if not (isinstance(features, np.ndarray) and features.dtype in (np.float32, np.int64)):
        raise DataError(f"features must be a float32 or int64 array, got {_kind(features)}")
    if features.ndim < 2:
        raise DataError(
            f"features must have a row per example, got shape {features.shape}; "
            "reshape(-1, 1) makes one feature of a flat array"
        )
    if 0 in features.shape[1:]:
        raise DataError(f"an example must have at least one feature, got shape {features.shape}")
    if not (isinstance(targets, np.ndarray) and targets.dtype in (np.int64, np.float32)):
        raise DataError(f"targets must be an int64 or float32 array, got {_kind(targets)}")
    dimensions = (1,) if targets.dtype == np.int64 else (1, 2)
    if targets.ndim not in dimensions or 0 in targets.shape[1:]:
        raise DataError(
            f"targets must have shape (n,), or (n, k) when they are float32, "
            f"got {targets.dtype} of shape {targets.shape}"
        )


def _check_finite(name: str, array: NDArray[np.generic]) -> None:
    """Check values in chunks, as a mask for all values would take a quarter of their memory."""
    if array.dtype.kind != "f" or len(array) == 0:
        return
    rows = max(1, _CHUNK_VALUES * len(array) // array.size)
    chunks = [
        start + np.flatnonzero(~np.isfinite(part.reshape(len(part), -1)).all(axis=1))
        for start in range(0, len(array), rows)
        for part in (array[start : start + rows],)
    ]
    wrong = np.concatenate(chunks)
    if wrong.size:
        raise DataError(
            f"{name} must be finite float32 numbers; NaN or infinity in {wrong.size} of "
            f"{len(array)} examples, first in example {wrong[0]}"
        )


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__
