"""Vectorised seeds equal numpy's, word by word."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.core.seeding import SeedWords, seed_words

words = st.integers(0, 2**32 - 1)


@given(data=st.data(), length=st.integers(4, 9), rows=st.integers(1, 5), count=st.integers(1, 6))
def test_words_are_those_of_a_seed_sequence(
    data: st.DataObject, length: int, rows: int, count: int
) -> None:
    row = st.lists(words, min_size=length, max_size=length)
    entropy = np.array([data.draw(row) for _ in range(rows)], dtype=np.uint32)
    found = seed_words(entropy, count)
    assert found.dtype == np.uint64
    for own, expected in zip(found, map(np.random.SeedSequence, entropy), strict=True):
        np.testing.assert_array_equal(own, expected.generate_state(count, np.uint64))


def test_entropy_is_left_as_it_was() -> None:
    entropy = np.arange(14, dtype=np.uint32).reshape(2, 7)
    seed_words(entropy, 4)
    np.testing.assert_array_equal(entropy, np.arange(14).reshape(2, 7))


@pytest.mark.parametrize(("count", "dtype"), [(3, np.uint64), (4, np.uint32)])
def test_seeds_of_another_size_are_refused(count: int, dtype: type) -> None:
    seed = SeedWords(np.zeros(4, dtype=np.uint64))
    assert len(seed.generate_state(4, np.uint64)) == 4
    with pytest.raises(ValueError, match=f"{count} words of"):
        seed.generate_state(count, dtype)
