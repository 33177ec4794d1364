"""Examples: features and targets in the one form that the rest of fedsim works with."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import InputError

_CHECKED_AT_ONCE = 1 << 22  # values


class DataError(InputError):
    """The data cannot be used as the experiment asks; the message is one line with the fix."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Features and targets of some examples, or of none.

    Attributes:
        features: float32, (n, ...), finite; or int64 (n, ...), tokens for an embedding.
        targets: int64 (n,) for classes, float32 (n,) or (n, k) for regression and for labels of
            which several may hold; finite.

    Raises:
        DataError: on creation, for arrays that are not as above.
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
        """The shape of one example's features."""
        return self.features.shape[1:]

    @property
    def has_classes(self) -> bool:
        """Whether the targets are whole numbers, one per example."""
        return self.targets.dtype == np.int64

    def take(self, indices: NDArray[np.integer]) -> Self:
        """Return a copy of the examples at `indices`, in their order."""
        return type(self)(self.features[indices], self.targets[indices])

    def rows(self, chosen: NDArray[np.integer] | slice) -> Self:
        """Return some of the examples: a copy for row numbers, a view for a slice.

        They are not checked again, so that it costs no more than reading them.
        """
        found = object.__new__(type(self))
        object.__setattr__(found, "features", self.features[chosen])
        object.__setattr__(found, "targets", self.targets[chosen])
        return found


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
    """Check a part at a time: the answers for all values take a quarter of their memory."""
    if array.dtype.kind != "f" or len(array) == 0:
        return
    rows = max(1, _CHECKED_AT_ONCE * len(array) // array.size)
    wrong = [
        start + np.flatnonzero(~np.isfinite(part.reshape(len(part), -1)).all(axis=1))
        for start in range(0, len(array), rows)
        for part in (array[start : start + rows],)
    ]
    found = np.concatenate(wrong)
    if found.size:
        raise DataError(
            f"{name} must be finite float32 numbers; NaN or infinity in {found.size} of "
            f"{len(array)} examples, first in example {found[0]}"
        )


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__
