"""The payload: what goes in comes out of the sum, and a wrong sum does not come out at all."""

from typing import Any

import numpy as np
import pytest

from fedsim.server.secure_aggregation.errors import (
    LayoutMismatchError,
    ShareMismatchError,
    ValueOutOfRangeError,
)


def test_metrics_and_weights_are_summed(federation: Any) -> None:
    scene = federation(metrics=("correct", "loss_sum"))
    result = scene.plain([1, 2, 4])
    assert result.metrics == {"correct": 7.0, "loss_sum": 7.0}
    assert result.weight == scene.weights[1] + scene.weights[2] + scene.weights[4]
    assert result.clients == 3


def test_a_metric_beyond_its_room_is_refused(federation: Any) -> None:
    scene = federation(metrics=("loss_sum",), max_weight=100)
    keys = {"reference": scene.reference, "weight": 1}
    scene.codec.encode(scene.updates[0], metrics={"loss_sum": 800.0}, **keys)
    for value in (801.0, float("nan"), float("-inf")):
        with pytest.raises(ValueOutOfRangeError, match="at most max_weight x value_bound = 800"):
            scene.codec.encode(scene.updates[0], metrics={"loss_sum": value}, **keys)
    with pytest.raises(ValueError, match="exactly the declared"):
        scene.codec.encode(scene.updates[0], metrics={"other": 1.0}, **keys)


def test_clipped_coordinates_are_counted_in_the_sum(federation: Any) -> None:
    scene = federation(range_policy="clip", value_bound=0.05)
    changes = [
        np.concatenate([(scene.updates[i][n] - scene.reference[n]).ravel() for n in ("w", "b")])
        for i in range(6)
    ]
    assert scene.plain(range(6)).clipped == sum(int((abs(c) > 0.05).sum()) for c in changes) > 0


def test_shapes_are_never_broadcast(federation: Any) -> None:
    scene = federation(shapes={"w": (3,)})
    with pytest.raises(LayoutMismatchError):
        scene.codec.encode({"w": np.zeros(1, np.float32)}, reference=scene.reference, weight=1)


def test_parameters_can_be_sent_instead_of_changes(federation: Any) -> None:
    scene = federation()
    vector = scene.codec.encode(scene.updates[0], reference=None, weight=5)
    back = scene.codec.decode(vector, clients=1, reference=None)
    np.testing.assert_allclose(back.arrays["w"], scene.updates[0]["w"], atol=1e-7)


@pytest.mark.parametrize("place", [0, 6, -2, -1])
def test_a_missing_mask_is_seen_in_every_part_of_the_vector(federation: Any, place: int) -> None:
    scene = federation()
    vector = scene.codec.encode(scene.updates[0], reference=scene.reference, weight=5)
    vector[place] ^= np.uint64(2**62 + 12345)
    with pytest.raises(ShareMismatchError):
        scene.codec.decode(vector, clients=1, reference=scene.reference)


def test_a_doubled_share_is_seen_by_the_count(federation: Any) -> None:
    scene = federation()
    vector = scene.codec.encode(scene.updates[0], reference=scene.reference, weight=5)
    with pytest.raises(ShareMismatchError, match="sum up 2 clients, but 1 took part"):
        scene.codec.decode(vector * np.uint64(2), clients=1, reference=scene.reference)


def test_an_in_range_poisoned_vector_is_accepted(federation: Any) -> None:
    """What this does not protect from: a lie within the bounds looks like the truth."""
    scene = federation()
    scene.updates[5] = {n: np.asarray(v + 7.5, np.float32) for n, v in scene.reference.items()}
    scene.weights[5] = 100_000
    poisoned = scene.run()
    assert poisoned.arrays["b"] - scene.reference["b"] > 7.0
