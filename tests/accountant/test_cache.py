"""The cache keeps what is asked for most recently, within its bytes."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsim.accountant.checks import cached_by_bytes


def test_the_least_recently_used_results_go_first() -> None:
    calls: list[int] = []

    @cached_by_bytes(25)
    def digits(number: int) -> tuple[NDArray[np.uint8], None]:
        """Ten bytes."""
        calls.append(number)
        return np.full(10, number, np.uint8), None

    for number in (1, 2, 1, 3, 1, 2):
        assert digits(number)[0].tolist() == 10 * [number]
    assert calls == [1, 2, 3, 2]
    assert digits.__doc__ == "Ten bytes."


def test_one_result_is_kept_whatever_its_size() -> None:
    calls: list[int] = []

    @cached_by_bytes(5)
    def digits(number: int) -> NDArray[np.uint8]:
        calls.append(number)
        return np.zeros(10, np.uint8)

    assert digits(1) is digits(1)
    assert calls == [1]


def test_keywords_are_refused() -> None:
    cached: Any = cached_by_bytes(5)(np.zeros)
    with pytest.raises(TypeError, match="positional"):
        cached(shape=1)
