"""The payload: sums decode to the weighted mean, and wrong sums are refused."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.secagg.errors import (
    CapacityError,
    LayoutMismatchError,
    NonFiniteUpdateError,
    ShareMismatchError,
)
from fedsim.secagg.metrics import MetricGrids


def test_metrics_are_averaged_by_weight(secure_parties: Any) -> None:
    scene = secure_parties(metrics={"loss": 3.5, "accuracy": 100.0})  # 4 is above the bound of loss
    result = scene.plain([1, 2, 4])
    weights = [scene.weights[client] for client in (1, 2, 4)]
    assert result.weight == sum(weights)
    assert result.num_clients == 3
    wanted = {"accuracy": (1, 2, 4), "loss": (1, 2, 3.5)}
    for name, values in wanted.items():
        mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        assert result.metrics[name] == pytest.approx(mean, rel=1e-15)
    assert result.clipped_metrics == 1


@given(
    bound=st.floats(1e-6, 1e9),
    values=st.lists(st.floats(-1e10, 1e10), min_size=1, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_a_mean_of_metrics_is_exact_to_its_grid(
    secure_parties: Any, bound: float, values: list[float]
) -> None:
    """In rational numbers: clipping and rounding to nearest, and nothing else, at any bound."""
    encoder = secure_parties(clients=6).codec.encoder
    grids = MetricGrids.from_bounds({"m": bound}, encoder)
    assert 0 <= grids.grids[0].frac_bits <= encoder.frac_bits
    weights = [3 + 7 * client for client in range(len(values))]
    sums = [0, 0]
    for value, weight in zip(values, weights, strict=True):
        units = grids.encode({"m": value}, weight)
        assert abs(units[0]) <= weight * encoder.max_value  # an honest sum passes the range check
        sums = [one + more for one, more in zip(sums, units, strict=True)]
    means, clipped = grids.decode(sums, sum(weights))
    cut = [min(max(value, -bound), bound) for value in values]
    exact = sum(Fraction(v) * w for v, w in zip(cut, weights, strict=True)) / sum(weights)
    room = Fraction(1, 2 ** (grids.grids[0].frac_bits + 1)) + Fraction(math.ulp(means["m"]))
    assert abs(Fraction(means["m"]) - exact) <= room
    assert clipped == sum(abs(value) > bound for value in values)


def test_bad_metrics_are_refused_by_name(secure_parties: Any) -> None:
    scene = secure_parties(metrics={"loss": 8.0})
    keys = {"reference": scene.reference, "weight": 1}
    for value in (float("nan"), float("-inf")):
        with pytest.raises(NonFiniteUpdateError, match=r"client 3: metric 'loss' is"):
            scene.codec.encode(scene.updates[0], metrics={"loss": value}, client=3, **keys)
    with pytest.raises(ValueError, match="exactly the declared"):
        scene.codec.encode(scene.updates[0], metrics={"other": 1.0}, **keys)
    with pytest.raises(CapacityError, match="metric 'loss' with bound 1e\\+18 does not fit"):
        secure_parties(metrics={"loss": 1e18})


def test_clipped_coordinates_are_counted_in_the_sum(secure_parties: Any) -> None:
    scene = secure_parties(encoding={"range_policy": "clip", "value_bound": 0.05})
    changes = [
        np.concatenate([(scene.updates[i][n] - scene.reference[n]).ravel() for n in ("w", "b")])
        for i in range(6)
    ]
    assert scene.plain(range(6)).clipped == sum(int((abs(c) > 0.05).sum()) for c in changes) > 0


def test_shapes_are_never_broadcast(secure_parties: Any) -> None:
    scene = secure_parties(shapes={"w": (3,)})
    with pytest.raises(LayoutMismatchError):
        scene.codec.encode({"w": np.zeros(1, np.float32)}, reference=scene.reference, weight=1)


def test_parameters_can_be_sent_instead_of_changes(secure_parties: Any) -> None:
    scene = secure_parties()
    vector = scene.codec.encode(scene.updates[0], reference=None, weight=5)
    back = scene.codec.decode(vector, num_clients=1, reference=None)
    np.testing.assert_allclose(back.arrays["w"], scene.updates[0]["w"], atol=1e-7)


@pytest.mark.parametrize("place", [0, 6, -2, -1])
def test_a_missing_mask_is_seen_in_every_part_of_the_vector(
    secure_parties: Any, place: int
) -> None:
    scene = secure_parties()
    vector = scene.codec.encode(scene.updates[0], reference=scene.reference, weight=5)
    vector[place] ^= np.uint64(2**62 + 12345)
    with pytest.raises(ShareMismatchError):
        scene.codec.decode(vector, num_clients=1, reference=scene.reference)


def test_a_doubled_share_is_seen_by_the_count(secure_parties: Any) -> None:
    scene = secure_parties()
    vector = scene.codec.encode(scene.updates[0], reference=scene.reference, weight=5)
    with pytest.raises(ShareMismatchError, match="sum up 2 clients, but 1 took part"):
        scene.codec.decode(vector * np.uint64(2), num_clients=1, reference=scene.reference)


def test_an_in_range_poisoned_vector_is_accepted(secure_parties: Any) -> None:
    """A limit of the protocol: a false vector within the bounds is not detected."""
    scene = secure_parties()
    scene.updates[5] = {n: np.asarray(v + 7.5, np.float32) for n, v in scene.reference.items()}
    scene.weights[5] = 100_000
    poisoned = scene.run()
    assert poisoned.arrays["b"] - scene.reference["b"] > 7.0
