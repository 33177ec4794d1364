"""Loading of CIFAR-10 from its official files, including the pickled ones, without unpickling.

A pickle can run code when it is loaded. So `read_pickled_batch` only lists the instructions of the
file with `pickletools`, which executes none, and takes the pixels and labels from them.

Reference: the CIFAR page of Alex Krizhevsky ("Learning multiple layers of features from tiny
images", 2009).
"""

import pickletools
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data.builtin.official_files import OfficialFiles
from fedsim.data.catalog import FolderArgs
from fedsim.data.examples import DataError, Dataset, to_dataset
from fedsim.data.settings import LoadContext

Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]

_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32  # bytes of an image, all red pixels first
_MAX_BATCH_BYTES = 1 << 28  # official batches have 30 MB
_SOURCE = "the CIFAR page of Alex Krizhevsky"
_BINARY = OfficialFiles(_SOURCE, ("", "cifar-10-batches-bin"), ("cifar-10-binary.tar.gz",))
_PYTHON = OfficialFiles(_SOURCE, ("", "cifar-10-batches-py"), ("cifar-10-python.tar.gz",))
_NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def load_cifar10(args: FolderArgs, context: LoadContext) -> Dataset:
    """Return CIFAR-10: images (3, 32, 32) in [0, 1], 50,000 for training and 10,000 for test.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder = context.folder(args.path)
    binary = [f"{name}.bin" for name in _NAMES]
    batches = _PYTHON.find(folder, _NAMES, read_pickled_batch)
    if batches is None:
        batches = _BINARY.read(folder, binary, read_binary_batch)
    *train, (x_test, y_test) = batches
    x, y = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return to_dataset(x, y, x_test, y_test)._replace(class_names=_CLASSES)


def read_binary_batch(file: IO[bytes], where: str) -> Batch:
    """Return images (n, 3, 32, 32) and labels (n,) of one file of CIFAR-10's binary version.

    Args:
        file: the open file.
        where: the file's name in messages.

    Raises:
        DataError: the file is not in this format.
    """
    content = _content(file, where)
    if not content or len(content) % (1 + _PIXELS):
        raise DataError(
            f"{where}: must have {1 + _PIXELS:,} bytes for each image, got {len(content):,} in "
            "all; get the official file anew"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
    return _batch(rows[:, 1:], rows[:, 0], where)


def read_pickled_batch(file: IO[bytes], where: str) -> Batch:
    """Return images (n, 3, 32, 32) and labels (n,) of one file of CIFAR-10's Python version.

    Guarantee: nothing in the file is executed.

    Args:
        file: the open file.
        where: the file's name in messages.

    Raises:
        DataError: the file is not in this format.
    """
    try:
        pixels, labels = _values(pickletools.genops(_content(file, where)))
    except (ValueError, UnicodeError) as error:
        raise DataError(f"{where}: is no pickled batch: {error}") from error
    if not labels or len(pixels) != len(labels) * _PIXELS:
        raise DataError(
            f"{where}: must have {_PIXELS:,} bytes of pixels for each label, got {len(pixels):,} "
            f"and {len(labels):,} labels; use the binary version"
        )
    images = np.frombuffer(pixels, np.uint8).reshape(-1, _PIXELS)
    return _batch(images, np.array(labels), where)


def _values(instructions: Iterator[tuple[Any, Any, Any]]) -> tuple[bytes, list[int]]:
    """Return the pixels (the longest string) and the labels (the numbers after `labels`)."""
    pixels, labels, in_labels = b"", list[int](), False
    for code, value, _ in instructions:
        if isinstance(value, str | bytes | bytearray) and code.name != "GLOBAL":
            text = value.encode("latin-1", "replace") if isinstance(value, str) else bytes(value)
            pixels = text if len(text) > len(pixels) else pixels
            in_labels = text == b"labels"
        elif in_labels and isinstance(value, int) and code.name.startswith("BININT"):
            labels.append(value)
    return pixels, labels


def _batch(images: NDArray[np.uint8], labels: NDArray[Any], where: str) -> Batch:
    wrong = labels[(labels < 0) | (labels >= len(_CLASSES))]
    if wrong.size:
        raise DataError(f"{where}: labels must be 0, ..., {len(_CLASSES) - 1}, got {wrong[0]}")
    return images.reshape(-1, *_SHAPE), labels.astype(np.uint8)


def _content(file: IO[bytes], where: str) -> bytes:
    content = file.read(_MAX_BATCH_BYTES + 1)
    if len(content) > _MAX_BATCH_BYTES:
        raise DataError(f"{where}: is larger than any batch of CIFAR-10; get it anew")
    return content
