"""Loading of the small datasets that scikit-learn contains, without files or network."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data.builtin import installed_file
from fedsim.data.catalog import NoArgs, TableArgs
from fedsim.data.examples import Dataset, Examples
from fedsim.data.settings import LoadContext

Ranges = tuple[tuple[float, float], ...]

# Smallest and largest value of each feature in the datasets' published descriptions. They are
# constants, so that no run computes a statistic of private examples.
_IRIS: Ranges = ((4.3, 7.9), (2.0, 4.4), (1.0, 6.9), (0.1, 2.5))
_WINE: Ranges = (
    (11.03, 14.83), (0.74, 5.8), (1.36, 3.23), (10.6, 30), (70, 162), (0.98, 3.88), (0.34, 5.08),
    (0.13, 0.66), (0.41, 3.58), (1.28, 13), (0.48, 1.71), (1.27, 4), (278, 1680),
)  # fmt: skip
_BREAST_CANCER: Ranges = (
    (6.981, 28.11), (9.71, 39.28), (43.79, 188.5), (143.5, 2501), (0.053, 0.163), (0.019, 0.345),
    (0, 0.427), (0, 0.201), (0.106, 0.304), (0.05, 0.097), (0.112, 2.873), (0.36, 4.885),
    (0.757, 21.98), (6.802, 542.2), (0.002, 0.031), (0.002, 0.135), (0, 0.396), (0, 0.053),
    (0.008, 0.079), (0.001, 0.03), (7.93, 36.04), (12.02, 49.54), (50.41, 251.2), (185.2, 4254),
    (0.071, 0.223), (0.027, 1.058), (0, 1.252), (0, 0.291), (0.156, 0.664), (0.055, 0.208),
)  # fmt: skip
_DIABETES: Ranges = (
    (19, 79), (1, 2), (18, 42.2), (62, 133), (97, 301), (41.6, 242.4), (22, 99), (2, 9.09),
    (3.2581, 6.107), (58, 124),
)  # fmt: skip
_DIABETES_TARGET: Ranges = ((25, 346),)
_LINNERUD: Ranges = ((1, 17), (50, 251), (25, 250))
_LINNERUD_TARGETS: Ranges = ((138, 247), (31, 46), (46, 74))


@dataclass(frozen=True)
class _Table:
    """A table of scikit-learn.

    Attributes:
        features: published range of each feature.
        targets: published range of each target of a regression; None for classes.
        options: further arguments of scikit-learn's loader.
    """

    features: Ranges
    targets: Ranges | None = None
    options: tuple[tuple[str, Any], ...] = ()


TABLES = {
    "iris": _Table(_IRIS),
    "wine": _Table(_WINE),
    "breast_cancer": _Table(_BREAST_CANCER),
    "diabetes": _Table(_DIABETES, _DIABETES_TARGET, (("scaled", False),)),
    "linnerud": _Table(_LINNERUD, _LINNERUD_TARGETS),
}


def load_digits(args: NoArgs | None = None, context: LoadContext | None = None) -> Dataset:
    """Return scikit-learn's digits: 1,797 images (1, 8, 8) with values in [0, 1], 10 classes.

    The arguments, which all loaders share, are not used.
    """
    x, y = _digits()
    pixels = np.asarray(x, dtype=np.float32).reshape(-1, 1, 8, 8) / np.float32(16)
    return Dataset(Examples(pixels, np.array(y, dtype=np.int64)))


def load_table(name: str, args: TableArgs, context: LoadContext | None = None) -> Dataset:
    """Return one of scikit-learn's small tables, with features scaled to about [0, 1] by default.

    Args:
        name: iris, wine, breast_cancer, diabetes or linnerud.
        args: the setting `data.args`.
        context: not used.
    """
    from sklearn import datasets

    about = TABLES[name]
    table = getattr(datasets, f"load_{name}")(**dict(about.options))
    features = _scale(table.data, about.features, args)
    if about.targets is None:
        names = tuple(map(str, table.target_names))
        targets = np.asarray(table.target, dtype=np.int64)
        return Dataset(Examples(features, targets), class_names=names)
    columns = np.asarray(table.target).reshape(len(features), -1)
    targets = _scale(columns, about.targets, args)
    is_single = targets.shape[1] == 1
    return Dataset(Examples(features, targets[:, 0].copy() if is_single else targets))


load_iris = partial(load_table, "iris")
load_wine = partial(load_table, "wine")
load_breast_cancer = partial(load_table, "breast_cancer")
load_diabetes = partial(load_table, "diabetes")
load_linnerud = partial(load_table, "linnerud")


def _scale(table: Any, ranges: Ranges, args: TableArgs) -> NDArray[np.float32]:
    values = np.asarray(table, dtype=np.float64)
    if args.scaled:
        low, high = np.array(ranges).T
        values = (values - low) / (high - low)
    return values.astype(np.float32)


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the digits' pixels (1797, 64) and classes (1797,) of scikit-learn's `load_digits`.

    Importing that function takes longer than the rounds of a first experiment. Its file is read
    directly if it is in the usual place.
    """
    file = installed_file("sklearn", "datasets/data/digits.csv.gz")
    if file is not None:
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits as load

    pixels, classes = load(return_X_y=True)
    return np.asarray(pixels), np.asarray(classes)
