"""The server's public test set, held out before the data is divided among clients."""

import numpy as np
from numpy.typing import NDArray

from fedsim.core.streams import Purpose, stream
from fedsim.data.conversion import Dataset
from fedsim.data.examples import DataError, Examples

DEFAULT_TEST_FRACTION = 0.2


def hold_out(
    dataset: Dataset, test_fraction: float | None, *, seed: int
) -> tuple[NDArray[np.int64], Examples]:
    """Return (row numbers of the training examples in `dataset.train`, test examples).

    The training examples are not copied; the test examples are, unless they are all of a test set.

    Args:
        dataset: the data; its own test set is used where it brings one.
        test_fraction: share of the examples to hold out, in (0, 1); None: 0.2, or the dataset's
            own test set.
        seed: the experiment's seed.

    Raises:
        DataError: if the dataset brings a test set and `test_fraction` is given too, or if there
            are too few examples to hold any out.
    """
    for what, examples in (("training", dataset.train), ("test", dataset.test)):
        if examples is not None and len(examples) == 0:
            raise DataError(f"there must be at least one {what} example, got none")
    if dataset.test is not None:
        if test_fraction is not None:
            raise DataError(
                "data.test_fraction must be left out for a dataset that brings its own test set, "
                f"got {test_fraction}"
            )
        return np.arange(len(dataset.train)), dataset.test
    fraction = DEFAULT_TEST_FRACTION if test_fraction is None else test_fraction
    train, test = split_indices(len(dataset.train), fraction, seed=seed)
    return train, dataset.train.rows(test)


def held_out(
    rows: NDArray[np.int64], fraction: float, *, seed: int, client: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide a client's rows into those that it trains on and those that it holds out.

    It holds out `len(rows) * fraction` of them, rounded, and never the last one to train on.
    """
    number = min(round(len(rows) * fraction), max(len(rows) - 1, 0))
    order = stream(seed, Purpose.HELD_OUT, client=client).permutation(len(rows))
    return rows[np.sort(order[number:])], rows[np.sort(order[:number])]


def split_indices(
    num_examples: int, test_fraction: float, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sorted (training, test) indices of a shuffled split.

    The test set has `num_examples * test_fraction` examples, rounded, and each side has at least
    one.

    Raises:
        DataError: for fewer than two examples or a fraction outside (0, 1).
    """
    if not 0 < test_fraction < 1:
        raise DataError(f"data.test_fraction must be between 0 and 1, got {test_fraction}")
    if num_examples < 2:
        raise DataError(
            f"a test set can be held out of at least 2 examples, got {num_examples}; "
            "add data or bring a test set of your own"
        )
    num_test = min(max(round(num_examples * test_fraction), 1), num_examples - 1)
    order = stream(seed, Purpose.SPLIT).permutation(num_examples)
    return np.sort(order[num_test:]), np.sort(order[:num_test])
