"""Live arrays behave like Flower's arrays, shared and read-only; a digest is of every bit."""

import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedsim.protocol.arrays import LiveArray, digest, is_live, live_record, to_arrays

VALUES = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "n": np.array(7),
    "e": np.empty((0, 2)),
}


def test_they_say_what_serialized_arrays_say() -> None:
    live = live_record(VALUES)
    plain = ArrayRecord({name: Array(value) for name, value in VALUES.items()})
    assert list(live) == list(plain)
    for name, array in live.items():
        other = plain[name]
        assert (array.dtype, array.shape, array.stype) == (other.dtype, other.shape, other.stype)
        assert array.data == other.data
        assert array == other
        assert other == array
        np.testing.assert_array_equal(array.numpy(), other.numpy())
    assert digest(live) == digest(plain)
    assert live == plain
    assert ArrayRecord(dict(live)).deflate() == plain.deflate()
    assert is_live(live)
    assert not is_live(plain)


def test_a_live_array_cannot_be_changed() -> None:
    array = LiveArray(np.zeros(3))
    with pytest.raises(ValueError, match="read-only"):
        array.numpy()[0] = 1
    with pytest.raises(AttributeError, match="cannot be changed"):
        array.data = b"other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="cannot be changed"):
        array.dtype = "float32"  # pyright: ignore[reportAttributeAccessIssue]


def test_numbers_are_not_copied() -> None:
    values = np.zeros(3)
    assert np.shares_memory(LiveArray(values).numpy(), values)


def test_what_leaves_the_process_is_flowers_own() -> None:
    live = live_record(VALUES)
    for record in (ArrayRecord(dict(live)), pickle.loads(pickle.dumps(live))):
        assert all(type(array) is Array for array in record.values())
        assert digest(record) == digest(live)


def test_digest_tells_models_apart() -> None:
    base = digest(to_arrays(VALUES))
    assert base == digest(to_arrays({k: v.copy() for k, v in VALUES.items()}))
    w = VALUES["w"]
    renamed = {("v" if name == "w" else name): value for name, value in VALUES.items()}
    nextafter, turned = np.nextafter(w, np.float32(9)), w.reshape(3, 2)
    for other in ({**VALUES, "w": nextafter}, {**VALUES, "w": turned}, renamed):
        assert digest(to_arrays(other)) != base
