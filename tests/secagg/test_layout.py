"""The layout: exactly these tensors, nothing broadcast, every number back in its place."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsim.secagg.errors import LayoutMismatchError
from fedsim.secagg.payload import TensorLayout

MODEL = {
    "w": np.arange(6, dtype=np.float32).reshape(3, 2),
    "b": np.zeros(3, np.float16),
    "steps": np.asarray(7, np.int64),
    "none": np.zeros((0, 4), np.float64),
}
LAYOUT = TensorLayout.from_arrays(MODEL)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda m: {"b": m["b"], "w": m["w"], "steps": m["steps"], "none": m["none"]}, "'w'"),
        (lambda m: {**m, "w": m["w"].astype(np.float64)}, "'w'"),
        (lambda m: {**m, "b": m["b"].reshape(3, 1)}, "'b'"),
        (lambda m: {**m, "b": m["b"][:1]}, "'b'"),
        (lambda m: {**m, "extra": m["b"]}, "expected nothing, got 'extra'"),
        (lambda m: {k: v for k, v in m.items() if k != "none"}, "expected 'none'.*got nothing"),
    ],
)
def test_other_layouts_are_refused_naming_the_first_difference(change: Any, first: str) -> None:
    other = change(MODEL)
    assert TensorLayout.from_arrays(other).digest != LAYOUT.digest
    with pytest.raises(LayoutMismatchError, match=first):
        LAYOUT.check(other)


def test_strides_and_byte_order_do_not_matter() -> None:
    other = {**MODEL, "w": np.asfortranarray(MODEL["w"]).astype(">f4")}
    LAYOUT.check(other)
    assert TensorLayout.from_arrays(other).digest == LAYOUT.digest


def test_types_without_a_sum_are_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="complex64, which has no sum"):
        TensorLayout.from_arrays({"w": np.zeros(2, np.complex64)})


@given(
    shapes=st.lists(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3), max_size=4)
)
def test_flattened_and_back(shapes: list[tuple[int, ...]]) -> None:
    arrays = {
        str(i): np.random.default_rng(i).normal(size=shape).astype(np.float32)
        for i, shape in enumerate(shapes)
    }
    layout = TensorLayout.from_arrays(arrays)
    flat = [value.reshape(-1) for value in arrays.values()]
    vector = np.concatenate([*flat, np.empty(0)]).astype(np.float64)
    back = layout.unflatten(vector)
    assert list(back) == list(arrays)
    for name, value in arrays.items():
        assert back[name].dtype == value.dtype
        np.testing.assert_array_equal(back[name], value)


def test_integers_are_rounded_on_the_way_back() -> None:
    layout = TensorLayout.from_arrays({"n": np.asarray([5, 5], np.int64)})
    back = layout.unflatten(np.array([0.6, -0.6]), plus={"n": np.asarray([5, 5], np.int64)})
    assert back["n"].tolist() == [6, 4]


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="must have 10 values"):
        LAYOUT.unflatten(np.zeros(9))
