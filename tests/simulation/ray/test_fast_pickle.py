"""Values cross Ray unchanged, large arrays without a copy."""

import pickle
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")

from ray import cloudpickle

from fedsim.simulation.ray.session import FastPickle


def sent(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle as Ray does."""
    beside: list[pickle.PickleBuffer] = []
    dumps: Any = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage]
    return dumps(FastPickle(value), protocol=5, buffer_callback=beside.append), beside


@pytest.mark.parametrize("order", ["C", "F"])
def test_large_arrays_travel_beside_and_small_ones_inside(order: Any) -> None:
    large = np.asarray(np.arange(40_000.0).reshape(200, 200), order=order)
    small = np.arange(10.0)
    content, beside = sent({"large": large, "small": [small, small], "part": large[::2]})
    assert len(beside) == 1, "the array itself; a part of it is no buffer of its own"
    assert len(content) < large[::2].nbytes + 2000
    found = pickle.loads(content, buffers=beside)
    assert np.array_equal(found["large"], large)
    assert np.shares_memory(found["large"], large), "without a copy"
    assert np.array_equal(found["part"], large[::2])
    assert np.array_equal(found["small"][0], small)
    assert found["small"][0] is found["small"][1]


def test_what_only_cloudpickle_knows_arrives_too() -> None:
    large = np.arange(40_000.0)

    class Local:
        def __init__(self) -> None:
            self.numbers = large

    content, beside = sent([Local(), lambda x: x + 1, large])
    assert len(beside) == 1, "what a failed attempt had put beside is forgotten"
    one, function, numbers = pickle.loads(content, buffers=beside)
    assert np.array_equal(one.numbers, large)
    assert numbers is one.numbers
    assert function(1) == 2
