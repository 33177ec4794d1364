"""Functions of values that clients share: one call for each kind, and no kind taken for another."""

import pytest

from fedsim.federation.schedule import map_shared


class Settings:
    """Settings that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]


def test_shared_values_are_computed_once() -> None:
    calls: list[tuple[object, int]] = []

    def plan(settings: object, size: int) -> object:
        calls.append((settings, size))
        return object()

    own, other = Settings(), Settings()
    found = [*map_shared(plan, [own, own, other, own], [1000, 1000, 1000, 2000])]
    assert calls == [(own, 1000), (other, 1000), (own, 2000)]
    assert found[0] is found[1]
    assert len(set(map(id, found))) == 3


def test_equal_numbers_of_other_kinds_are_not_shared() -> None:
    values = [1, 1.0, True, 0.0, -0.0, "1", None, float("nan")]
    assert [*map(repr, map_shared(lambda value: value, values))] == [*map(repr, values)]


def test_sequences_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(map_shared(lambda one, other: one, [1, 2], [1]))
