"""The class of examples (features and targets as checked arrays), and conversion of users' data.

Users' arrays, tensors, images and lists become `Examples`. Images get the layout (n, channels,
height, width) and are scaled. The scaling depends on the type and shape of the array, never on its
values, because a constant that is computed from private examples would reveal something about them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import InputError
from fedsim.data.settings import ImageSettings

_CHUNK_VALUES = 1 << 22
BYTE_SCALE = 255.0
"""Largest value of an 8-bit channel, by which images of bytes are divided."""

_CHANNELS = (1, 3, 4)  # grey, RGB, RGB with transparency


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

    def rows(self, indices: NDArray[np.integer] | slice) -> Self:
        """Return the examples at `indices`, in that order: a copy for an array, a view for a slice.

        The values are not checked again.
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


def as_images(array: NDArray[Any], settings: ImageSettings | None, name: str) -> NDArray[Any]:
    """Return images as scaled arrays (n, channels, height, width); other features stay unchanged.

    | array                               | without `data.images`                               |
    |-------------------------------------|-----------------------------------------------------|
    | uint8 of three or four dimensions   | divided by 255; (n, h, w) becomes (n, 1, h, w), and |
    |                                     | (n, h, w, channels) becomes (n, channels, h, w)     |
    | other types, channels last          | refused: set `data.images.channels`                 |
    | everything else                     | unchanged                                           |

    Args:
        array: features (n, ...) of any real number type.
        settings: the setting `data.images`; None applies the rules of the table.
        name: name of the array in messages.

    Raises:
        DataError: the layout is ambiguous, or the settings do not fit the array.
    """
    settings = ImageSettings() if settings is None else settings
    if settings.channels == "none" and array.ndim != 3:
        raise DataError(_misfit(array, name, "none", "(n, height, width)"))
    if settings.channels in ("first", "last") and array.ndim != 4:
        raise DataError(_misfit(array, name, settings.channels, "of four dimensions"))
    layout = settings.channels or _layout(array, name)
    if layout == "none":
        array = array[:, None]
    elif layout == "last":
        array = np.moveaxis(array, -1, 1)
    scale = settings.scale
    if scale is None and array.dtype == np.uint8 and array.ndim >= 3:
        scale = BYTE_SCALE
    if scale is None or scale == 1:
        return array
    with np.errstate(over="ignore"):  # becomes infinite, which Examples refuses
        return np.divide(array, np.float32(scale), dtype=np.float32, casting="same_kind")


def _layout(array: NDArray[Any], name: str) -> str | None:
    if array.ndim == 3 and array.dtype == np.uint8:
        return "none"
    if array.ndim != 4 or not _looks_channels_last(array.shape[1:]):
        return None
    if array.dtype == np.uint8:
        return "last"
    raise DataError(
        f"{name} has shape {array.shape}, which looks like images with channels last, and models "
        "take channels first; write data.images: {channels: last} to move them, or "
        "{channels: first} if the axes are right as they are"
    )


def _looks_channels_last(shape: tuple[int, ...]) -> bool:
    first, second, last = shape
    if first in _CHANNELS:
        return False
    return last in _CHANNELS or (first == second and last < first)


def _misfit(array: NDArray[Any], name: str, channels: str, form: str) -> str:
    return (
        f"data.images.channels: {channels} is for arrays {form}, and {name} has shape "
        f"{array.shape}; remove channels"
    )


_INT64_MAX = np.iinfo(np.int64).max
_LARGEST_TOKEN = np.iinfo(np.int32).max  # embeddings index rows with int32


class Dataset(NamedTuple):
    """A dataset before its examples are divided among clients.

    Attributes:
        train: the training examples, or all examples of a dataset without a test set.
        test: the test set that comes with the dataset; None if it has none.
        class_names: name of each class; None if the data do not name the classes.
        groups: columns, by name, that can divide the training examples among clients. Each column
            has one text per example.
        columns: names of the table columns that are features, in order; None for other sources.
    """

    train: Examples
    test: Examples | None = None
    class_names: tuple[str, ...] | None = None
    groups: Mapping[str, Sequence[str]] = MappingProxyType({})
    columns: tuple[str, ...] | None = None


def to_dataset(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    tokens: bool = False,
    images: ImageSettings | None = None,
) -> Dataset:
    """Return a dataset from numpy arrays, torch tensors or nested lists.

    Features become float32. Images of bytes are divided by 255, and channels become the first
    axis of an image (see `as_images`); other features are not rescaled. Targets become:

    | targets                     | become                                                        |
    |-----------------------------|---------------------------------------------------------------|
    | integers or booleans (n,)   | int64 (n,); a column (n, 1) counts as (n,)                    |
    | integers or booleans (n, k) | float32 (n, k)                                                |
    | other real numbers          | float32 of the same shape                                     |
    | text (n,)                   | classes in sorted order, training and test targets together   |

    Args:
        x: features (n, ...) of any real number type.
        y: targets (n,) or (n, k).
        x_test: features of the test set that comes with the dataset; None if it has none.
        y_test: targets of that test set; None if there is none.
        tokens: whether features are whole numbers >= 0 for an embedding, which become int64.
        images: the setting `data.images`.

    Raises:
        DataError: values are not numeric or do not have these shapes.
    """
    if (x_test is None) != (y_test is None):
        raise DataError("a test set must have both features and targets, got only one of them")
    features = partial(_features, tokens=tokens, images=images)
    given = {"y": y} if y_test is None else {"y": y, "y_test": y_test}
    targets, names = _encoded([_array(value, name) for name, value in given.items()])
    train = Examples(features(x, "x"), _targets(targets[0], "y"))
    if x_test is None:
        return Dataset(train, None, names)
    test = Examples(features(x_test, "x_test"), _targets(targets[1], "y_test"))
    _check_same_form(train, test)
    return Dataset(train, test, names)


def _array(value: Any, name: str) -> NDArray[Any]:
    if np.ma.is_masked(value):
        raise DataError(f"{name} is a masked array with missing values; fill them, or remove rows")
    if hasattr(value, "detach"):  # a torch tensor; torch is not imported here
        value = value.detach().cpu()
        if value.is_floating_point():  # numpy has no bfloat16
            value = value.float()
        value = value.numpy()
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{name} must be an array, a tensor or a list with rows of equal length: {error}"
        ) from error


def _features(
    value: Any, name: str, *, tokens: bool, images: ImageSettings | None
) -> NDArray[np.float32] | NDArray[np.int64]:
    array = _array(value, name)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name} must be numeric, got {array.dtype} of shape {array.shape}; "
            "encode text and categories as numbers"
        )
    return _tokens(array, name) if tokens else _float32(as_images(array, images, name))


def _tokens(array: NDArray[Any], name: str) -> NDArray[np.int64]:
    """Return whole numbers as int64; cells of a table are float64, exact up to 2^53."""
    wrong = (array < 0) | (array > _LARGEST_TOKEN)
    if array.dtype.kind == "f":
        wrong |= array != np.rint(array)
    if wrong.any():
        raise DataError(
            f"data.features: tokens must be whole numbers from 0 to {_LARGEST_TOKEN}, got "
            f"{array[wrong][0]} in {name}; for numbers, remove data.features"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def _targets(array: NDArray[Any], name: str) -> NDArray[np.int64] | NDArray[np.float32]:
    if array.dtype.kind == "f":
        return _float32(array)
    if array.dtype.kind not in "biu":
        raise DataError(
            f"{name} must be numbers or class names, got {array.dtype} of shape {array.shape}"
        )
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim > 1:
        return _float32(array)
    if array.dtype == np.uint64 and array.size and array.max() > _INT64_MAX:
        raise DataError(f"{name} must be below 2^63, got {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _float32(array: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # becomes infinite, which Examples refuses
        return np.ascontiguousarray(array, dtype=np.float32)


def _is_text(array: NDArray[Any]) -> bool:
    if array.dtype.kind == "O":
        return array.ndim == 1 and all(isinstance(item, str) for item in array)
    return array.dtype.kind in "UST" and array.ndim == 1


def _encoded(targets: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], tuple[str, ...] | None]:
    """Return text targets as class numbers, and the class names; numbers unchanged, and None."""
    if len({_is_text(part) for part in targets}) > 1:
        raise DataError("training and test targets must be both text or both numbers")
    if not _is_text(targets[0]):
        return targets, None
    names, codes = np.unique(np.concatenate(targets), return_inverse=True)
    texts = (
        name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names
    )
    return np.split(codes.astype(np.int64), [len(targets[0])]), tuple(texts)


def _check_same_form(train: Examples, test: Examples) -> None:
    for name, first, second in (
        ("features", train.features, test.features),
        ("targets", train.targets, test.targets),
    ):
        if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
            raise DataError(
                f"training and test {name} must have one form, got {first.dtype} of shape "
                f"{first.shape} and {second.dtype} of shape {second.shape}"
            )


def digest_examples(examples: Examples) -> bytes:
    """Return the digest of a client's examples; treat the digest as private, like the examples."""
    state = hashlib.blake2b(digest_size=32)
    for array in (examples.features, examples.targets):
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return state.digest()
