import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.server.aggregation.aggregator import InvalidUpdateError, OrderedMean, check_update

REFERENCE = {"w": np.zeros((2, 3), np.float32), "steps": np.zeros((), np.int64)}


def update(value: float, steps: int = 0) -> dict[str, np.ndarray]:
    return {"w": np.full((2, 3), value, np.float32), "steps": np.array(steps, np.int64)}


def test_mean_of_two_is_the_hand_computed_one() -> None:
    mean = OrderedMean([0, 1], REFERENCE)
    mean.add(0, update(1.0, 3), 1.0)
    mean.add(1, update(4.0, 6), 2.0)
    result = mean.result()
    assert result is not None
    np.testing.assert_array_equal(result["w"], np.full((2, 3), 3.0, np.float32))
    assert result["steps"] == 5
    assert result["steps"].dtype == np.int64


@given(st.permutations(range(6)), st.integers(0, 2**32 - 1))
def test_result_does_not_depend_on_arrival(order: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    updates = [
        {
            "w": generator.normal(scale=10.0**k, size=(2, 3)).astype(np.float32),
            "steps": np.array(k, np.int64),
        }
        for k in range(6)
    ]
    results = []
    for arrival in (range(6), order):
        mean = OrderedMean(range(6), REFERENCE)
        for client in arrival:
            mean.add(client, updates[client], 1.0 + client)
        result = mean.result()
        assert result is not None
        results.append(result["w"].tobytes())
    assert results[0] == results[1]


def test_skipped_clients_leave_the_weights_of_others_alone() -> None:
    mean = OrderedMean([3, 5, 9], REFERENCE)
    mean.add(9, update(4.0), 1.0)
    mean.skip(3)
    mean.add(5, update(2.0), 1.0)
    result = mean.result()
    assert result is not None
    np.testing.assert_array_equal(result["w"], np.full((2, 3), 3.0, np.float32))


def test_nobody_gives_none() -> None:
    mean = OrderedMean([0, 1], REFERENCE)
    mean.skip(0)
    mean.skip(1)
    assert mean.result() is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"w": np.zeros((2, 3), np.float32)}, "missing \\['steps'\\]"),
        ({**update(0), "z": np.zeros(1)}, "unexpected \\['z'\\]"),
        ({**update(0), "w": np.zeros((3,), np.float32)}, "'w' must be float32\\[2, 3\\]"),
        ({**update(0), "w": np.zeros((2, 3), np.float64)}, "got float64"),
        (update(float("nan")), "'w' has NaN or infinite"),
        (update(float("inf")), "'w' has NaN or infinite"),
    ],
)
def test_a_bad_update_is_refused_and_never_averaged(bad: dict, message: str) -> None:
    mean = OrderedMean([0, 1], REFERENCE)
    with pytest.raises(InvalidUpdateError, match=message):
        mean.add(0, bad, 1.0)
    mean.add(1, update(2.0), 1.0)
    result = mean.result()
    assert result is not None
    np.testing.assert_array_equal(result["w"], update(2.0)["w"])


def test_each_client_arrives_once() -> None:
    mean = OrderedMean([0, 1], REFERENCE)
    mean.add(0, update(1.0), 1.0)
    with pytest.raises(ValueError, match="client 0 is not in the order"):
        mean.add(0, update(1.0), 1.0)
    with pytest.raises(ValueError, match="client 7 is not in the order"):
        mean.skip(7)
    with pytest.raises(ValueError, match=r"clients \[1\] neither added nor skipped"):
        mean.result()


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 37.0), (3.7, 1e-3)])
def test_sums_are_float64_to_the_bit(weights: tuple[float, float]) -> None:
    """Products of float32 updates with their weights are not rounded to float32."""
    updates = [{"w": np.random.default_rng(k).standard_normal(99, np.float32)} for k in range(2)]
    mean = OrderedMean([0, 1], updates[0])
    expected = np.zeros(99)
    for client, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        mean.add(client, update, weight)
        expected += weight * update["w"].astype(np.float64)
    assert mean._sums is not None
    np.testing.assert_array_equal(mean._sums["w"], expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (5000,)])
@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_is_found_wherever_it_is(dtype: type, shape: tuple[int, ...]) -> None:
    """Numbers too large to be squared are finite nevertheless."""
    largest = np.full(shape, np.finfo(dtype).max, dtype)
    check_update({"w": largest}, {"w": largest})
    for place in {0, largest.size // 2, largest.size - 1}:
        for bad in (np.nan, np.inf, -np.inf):
            for start in (largest, np.zeros(shape, dtype), np.full(shape, -1.5, dtype)):
                update = start.copy()
                update.flat[place] = bad
                with pytest.raises(InvalidUpdateError, match="'w' has NaN or infinite values"):
                    check_update({"w": update}, {"w": largest})
                turned = update.T[..., ::-1] if len(shape) > 1 else update
                with pytest.raises(InvalidUpdateError, match="'w' has NaN or infinite values"):
                    check_update({"w": turned}, {"w": np.zeros(turned.shape, dtype)})
