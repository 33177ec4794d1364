"""The cache keeps what is asked for most recently, within its bytes."""

from typing import Any

import pytest

from fedsim.accountant.checks import cached_by_bytes


def test_the_least_recently_used_results_go_first() -> None:
    calls: list[int] = []

    @cached_by_bytes(25, len)
    def text(number: int) -> str:
        """Ten letters."""
        calls.append(number)
        return str(number) * 10

    for number in (1, 2, 1, 3, 1, 2):
        assert text(number) == str(number) * 10
    assert calls == [1, 2, 3, 2]
    assert text.bytes_kept == 20
    assert text.__doc__ == "Ten letters."


def test_one_result_is_kept_whatever_its_size() -> None:
    calls: list[int] = []

    @cached_by_bytes(5, len)
    def text(number: int) -> str:
        calls.append(number)
        return "x" * 10

    assert text(1) is text(1)
    assert calls == [1]


def test_keywords_are_refused() -> None:
    text: Any = cached_by_bytes(5, len)(str)
    with pytest.raises(TypeError, match="positional"):
        text(object=1)
