"""Splits of the data: the server's public test set, and the holdout of each client."""

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

    The training examples are not copied. Test examples are, unless the dataset brings a test set
    with memory of its own.

    Args:
        dataset: the data, with or without a test set.
        test_fraction: fraction of the examples to hold out, in (0, 1); None: the dataset's own test
            set, or 0.2 without one.
        seed: the experiment's seed.

    Raises:
        DataError: `test_fraction` is given for a dataset with a test set, or there are too few
            examples for a test set.
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
        return np.arange(len(dataset.train)), _on_its_own(dataset.test)
    fraction = DEFAULT_TEST_FRACTION if test_fraction is None else test_fraction
    train, test = split_indices(len(dataset.train), fraction, seed=seed)
    return train, dataset.train.rows(test)


def split_client(
    rows: NDArray[np.int64], fraction: float, *, seed: int, client: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (training rows, holdout rows) of a client, both sorted.

    Args:
        rows: row numbers of the client's examples, int64 (n,).
        fraction: fraction to hold out, in (0, 1); n * fraction is rounded, and at least one row
            remains for training.
        seed: the experiment's seed.
        client: number of the client.
    """
    num_held_out = min(round(len(rows) * fraction), max(len(rows) - 1, 0))
    order = stream(seed, Purpose.HELD_OUT, client=client).permutation(len(rows))
    return rows[np.sort(order[num_held_out:])], rows[np.sort(order[:num_held_out])]


def split_indices(
    num_examples: int, test_fraction: float, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sorted (training, test) indices of a random split, int64.

    Args:
        num_examples: number of examples n, at least 2.
        test_fraction: fraction of test examples, in (0, 1); n * test_fraction is rounded, and each
            part has at least one example.
        seed: the experiment's seed.

    Raises:
        DataError: for fewer than two examples or a fraction outside (0, 1).
    """
    if not 0 < test_fraction < 1:
        raise DataError(f"data.test_fraction must be between 0 and 1, got {test_fraction}")
    if num_examples < 2:
        raise DataError(
            f"a test set needs at least 2 examples in all, got {num_examples}; "
            "add examples or bring a test set of your own"
        )
    num_test = min(max(round(num_examples * test_fraction), 1), num_examples - 1)
    order = stream(seed, Purpose.SPLIT).permutation(num_examples)
    return np.sort(order[num_test:]), np.sort(order[:num_test])


def _on_its_own(test: Examples) -> Examples:
    """Return a copy of a test set that is a part of a larger array, which it would keep alive."""
    base = test.features.base
    is_part = type(base) is np.ndarray and base.nbytes > test.features.nbytes
    return Examples(test.features.copy(), test.targets.copy()) if is_part else test
