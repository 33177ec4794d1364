import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.data import DataError, Examples
from fedsim.data.examples import Dataset
from fedsim.data.load import hold_out, split_indices

EXAMPLES = Examples(np.arange(10, dtype=np.float32)[:, None], np.arange(10))


@given(
    n=st.integers(2, 200),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_split_is_disjoint_complete_and_rounded(n, fraction, seed):
    train, test = split_indices(n, fraction, seed=seed)
    assert sorted([*train, *test]) == list(range(n))
    assert abs(len(test) - n * fraction) <= 1
    assert len(train) >= 1
    assert len(test) >= 1
    again = split_indices(n, fraction, seed=seed)
    assert np.array_equal(again[1], test)


def test_seeds_give_different_splits_of_the_same_size():
    tests = [split_indices(1797, 0.2, seed=seed)[1] for seed in range(3)]
    assert [len(test) for test in tests] == [359] * 3
    assert not np.array_equal(tests[0], tests[1])


def test_hold_out_defaults_to_a_fifth():
    train, test = hold_out(Dataset(EXAMPLES), None, seed=0)
    assert (len(train), len(test)) == (8, 2)


def test_a_dataset_with_its_own_test_set_keeps_it():
    own = EXAMPLES.rows(np.arange(3))
    train, test = hold_out(Dataset(EXAMPLES, own), None, seed=0)
    assert np.array_equal(train, np.arange(10))
    assert test is own
    with pytest.raises(DataError, match="test_fraction must be left out"):
        hold_out(Dataset(EXAMPLES, own), 0.2, seed=0)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_fractions_outside_the_open_interval_are_refused(fraction):
    with pytest.raises(DataError, match="between 0 and 1"):
        split_indices(10, fraction, seed=0)


def test_one_example_cannot_be_split():
    with pytest.raises(DataError, match="at least 2"):
        split_indices(1, 0.5, seed=0)


def test_a_test_set_keeps_no_larger_array_in_memory():
    features, targets = np.ones((100, 3), np.float32), np.zeros(100, np.int64)
    _, test = hold_out(Dataset(EXAMPLES, Examples(features[:4], targets[:4])), None, seed=0)
    _, whole = hold_out(Dataset(EXAMPLES, Examples(features, targets)), None, seed=0)
    assert test.features.base is None
    assert np.shares_memory(whole.features, features)
