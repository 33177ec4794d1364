import numpy as np
import pytest

from fedsim.data import DataError, Examples

X = np.arange(6, dtype=np.float32).reshape(3, 2)
Y = np.array([0, 1, 2])


def test_length_shape_and_take():
    examples = Examples(X, Y)
    assert (len(examples), examples.input_shape, examples.has_classes) == (3, (2,), True)
    taken = examples.rows(np.array([2, 0]))
    assert taken.targets.tolist() == [2, 0]
    taken.features[:] = -1
    assert X.min() == 0, "take must copy"


def test_regression_targets_may_have_columns():
    assert not Examples(X, np.zeros((3, 4), dtype=np.float32)).has_classes


@pytest.mark.parametrize(
    ("features", "targets", "message"),
    [
        (X, Y[:2], "3 rows of features and 2 targets"),
        (X[:, 0], Y, "reshape"),
        (X[:, :0], Y, "at least one feature"),
        (X.astype(np.float64), Y, "float32 or int64 array, got float64"),
        (X.tolist(), Y, "got list"),
        (X, Y.astype(np.int32), "got int32"),
        (X, Y[:, None], r"got int64 of shape \(3, 1\)"),
        (X, np.zeros((3, 0), dtype=np.float32), "targets must have shape"),
        (X, np.zeros((3, 1, 1), dtype=np.float32), "targets must have shape"),
        (np.where(X == 3, np.float32(np.nan), X), Y, "features must be finite.*example 1"),
        (X, np.array([0, 1, np.inf], dtype=np.float32), "targets must be finite.*example 2"),
    ],
)
def test_unfit_arrays_are_refused(features, targets, message):
    with pytest.raises(DataError, match=message) as caught:
        Examples(features, targets)
    assert "\n" not in str(caught.value)


def test_a_client_may_have_no_examples():
    empty = Examples(X, Y).rows(np.array([], dtype=np.int64))
    assert len(empty) == 0
    assert empty.input_shape == X.shape[1:]
