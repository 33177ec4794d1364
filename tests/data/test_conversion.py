import numpy as np
import pytest
import torch

from fedsim.data import DataError
from fedsim.data.examples import to_dataset

X = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    "x",
    [
        X,
        np.array(X),
        np.array(X, dtype=np.float16),
        np.array(X, dtype=np.uint8),
        np.array(X, order="F"),
        torch.tensor(X, requires_grad=True),
        torch.tensor(X, dtype=torch.bfloat16),
    ],
)
def test_features_of_every_kind_become_float32(x):
    features = to_dataset(x, [0, 1, 2]).train.features
    assert features.dtype == np.float32
    assert features.flags.c_contiguous
    assert features.tolist() == X


@pytest.mark.parametrize(
    ("y", "dtype", "expected"),
    [
        ([2, 0, 1], np.int64, [2, 0, 1]),
        (np.array([2, 0, 1], dtype=np.uint8), np.int64, [2, 0, 1]),
        (np.array([[2], [0], [1]]), np.int64, [2, 0, 1]),
        (torch.tensor([2, 0, 1], dtype=torch.int32), np.int64, [2, 0, 1]),
        ([True, False, True], np.int64, [1, 0, 1]),
        ([0.5, 1.0, 2.0], np.float32, [0.5, 1.0, 2.0]),
        ([[1, 0], [0, 0], [1, 1]], np.float32, [[1, 0], [0, 0], [1, 1]]),
        (["b", "a", "b"], np.int64, [1, 0, 1]),
        (np.array(["b", "a", "b"], dtype=object), np.int64, [1, 0, 1]),
    ],
)
def test_targets_become_classes_or_numbers(y, dtype, expected):
    targets = to_dataset(X, y).train.targets
    assert targets.dtype == dtype
    assert targets.tolist() == expected


def test_text_classes_are_numbered_over_training_and_test_together():
    dataset = to_dataset(X, ["b", "c", "b"], X[:2], ["a", "c"])
    assert dataset.train.targets.tolist() == [1, 2, 1]
    assert dataset.test is not None
    assert dataset.test.targets.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ma.masked_equal(X, 2.0), [0, 1, 2]), "x is a masked array with missing values"),
        (([[1.0], [1.0, 2.0], [3.0]], [0, 1, 2]), "equal length"),
        (([["a"], ["b"], ["c"]], [0, 1, 2]), "x must be numeric"),
        ((np.zeros((3, 1), dtype=complex), [0, 1, 2]), "x must be numeric"),
        ((X, np.array([None, 1, 2], dtype=object)), "y must be numbers or class names"),
        ((X, np.array([1j, 1, 2])), "y must be numbers"),
        ((X, np.array([2**64 - 1, 1, 2], dtype=np.uint64)), "below 2"),
        ((np.array([[1e300], [1], [2]]), [0, 1, 2]), "finite"),
        ((X, [0, 1, 2], X, None), "only one of them"),
        ((X, [0, 1, 2], [[1.0]], [0]), "must have one form"),
        ((X, [0, 1, 2], X, [0.5, 1, 2]), "must have one form"),
        ((X, [0, 1, 2], X, ["a", "b", "c"]), "both text"),
    ],
)
def test_unfit_values_are_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        to_dataset(*arguments)
