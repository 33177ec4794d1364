"""Public directions: the same everywhere, independent, of the promised distribution."""

from typing import Any

import numpy as np
import pytest

from fedsim.zeroth_order.directions import Directions
from fedsim.zeroth_order.settings import ZerothOrderSettings


def directions(distribution: Any = "signs", *, seed: int = 3, size: int = 4001) -> Directions:
    settings = ZerothOrderSettings(name="zeroth_order", directions=4, distribution=distribution)
    return Directions(seed, size, settings)


@pytest.mark.parametrize("distribution", ["signs", "gaussian"])
def test_directions_repeat_and_differ_in_every_number_of_their_key(distribution: str) -> None:
    one, two = directions(distribution), directions(distribution)
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]
    found = [one.direction(*key) for key in keys]
    found.append(directions(distribution, seed=4).direction(1, 0, 0))
    assert all(np.array_equal(two.direction(*key), v) for key, v in zip(keys, found, strict=False))
    products = np.corrcoef(np.stack(found))
    assert np.abs(products - np.eye(5)).max() < 5 / np.sqrt(4001)
    assert np.stack(found).mean() < 5 / np.sqrt(5 * 4001)
    assert np.square(np.stack(found)).mean() == pytest.approx(1, abs=0.06)


def test_signs_have_the_length_of_the_root_of_their_number() -> None:
    assert set(np.unique(directions().direction(1, 0, 0))) == {-1.0, 1.0}


def test_an_update_is_the_sum_of_coefficients_times_directions() -> None:
    drawn, values = directions(size=11), np.arange(11, dtype=np.float32)
    coefficients = np.array([[0.5, 0, 0.25, -1], [2, 0, 0, 0]], np.float32)
    expected = values.astype(float)
    for step in range(2):
        for number in range(4):
            expected += coefficients[step, number] * drawn.direction(7, step, number)
    drawn.add_round(values, coefficients, 7)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
