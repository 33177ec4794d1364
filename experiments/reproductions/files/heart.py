"""FLamby's Heart-Disease: four centres of the UCI files `processed.*.data`, 13 features.

As in FLamby: columns 10 to 12 and rows with gaps are left out, columns 2 and 6 become indicator
columns without their first value, other values stay as they are, and two thirds of each centre are
for training, by the split of scikit-learn with its seed 43.
"""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

CENTRES = ("cleveland", "hungarian", "switzerland", "va")
_KEPT = (0, 1, 3, 4, 5, 7, 8, 9)  # numbers
_CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}  # values that have an indicator
_TARGET = 13


def load(path: str, seed: int = 0) -> tuple[NDArray[np.float32], ...]:
    """Return (x_train, y_train, x_test, y_test), centre after centre.

    Args:
        path: directory of the files, absolute.
        seed: not used; the split is fixed.
    """
    parts = [_divided(*_centre(Path(path), name)) for name in CENTRES]
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def centres(
    features: NDArray[np.float32],
    targets: NDArray[np.float32],
    path: str,
    seed: int = 0,
    num_clients: int | None = None,
) -> NDArray[np.str_]:
    """Return the centre of each training patient of `load`.

    Args:
        features: of the patients; not used.
        targets: of the patients; not used.
        path: as of `load`.
        seed: not used.
        num_clients: not used; a resumed run knows it.
    """
    sizes = [len(_divided(*_centre(Path(path), name))[0]) for name in CENTRES]
    return np.repeat(CENTRES, sizes)


def _centre(directory: Path, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    x, y = [], []
    with (directory / f"processed.{name}.data").open() as file:
        for row in csv.reader(file):
            used = [*row[:10], row[_TARGET]] if len(row) > _TARGET else ["?"]
            if "?" in used:
                continue
            values = [float(cell) for cell in used]
            indicators = [
                float(values[column] == value)
                for column, listed in _CATEGORIES.items()
                for value in listed
            ]
            x.append([*(values[column] for column in _KEPT), *indicators])
            y.append(float(values[-1] > 0))
    return np.array(x, dtype=np.float32), np.array(y, dtype=np.float32)


def _divided(
    x: NDArray[np.float32], y: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    has_both = min(int(y.sum()), int((1 - y).sum())) > 2
    train, test = train_test_split(
        np.arange(len(x)),
        test_size=0.34,
        train_size=0.66,
        random_state=43,
        stratify=y if has_both else None,
    )
    return x[train], y[train], x[test], y[test]
