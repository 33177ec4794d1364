"""Fixed point: exact sums, the error bound, and the capacity exact to one unit."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.secagg.encoding import BLOCK_VALUES, FixedPointEncoder, largest_frac_bits
from fedsim.secagg.errors import (
    CapacityError,
    InvalidWeightError,
    NonFiniteUpdateError,
    ValueOutOfRangeError,
)
from fedsim.secagg.settings import EncodingSettings


def encoder(**keys: Any) -> FixedPointEncoder:
    defaults: dict[str, Any] = {
        "frac_bits": 24,
        "value_bound": 8.0,
        "max_weight": 1000,
        "max_clients": 100,
    }
    return FixedPointEncoder(**{**defaults, **keys})


def encoded(coder: FixedPointEncoder, values: Any, weight: int = 1, **keys: Any) -> np.ndarray:
    values = np.asarray(values).reshape(-1)
    out = np.empty(len(values), coder.dtype)
    coder.encode_into(out, values, weight, **keys)
    return out


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_decoded_mean_is_within_the_bound_of_exact_rational_arithmetic(data: Any) -> None:
    bound = data.draw(st.floats(2.0**-6, 2.0**6))
    heaviest = data.draw(st.integers(1, 10**5))
    clients = data.draw(st.integers(1, 20))
    dtype = data.draw(st.sampled_from([np.float16, np.float32, np.float64]))
    places = largest_frac_bits(
        ring_bits=64, guard_bits=8, units=heaviest * clients, value_bound=bound
    )
    coder = encoder(
        frac_bits=data.draw(st.integers(0, places)),
        value_bound=bound,
        max_weight=heaviest,
        max_clients=clients,
    )
    inside = st.floats(-bound, bound).map(dtype).filter(lambda x: abs(float(x)) <= bound)
    values = data.draw(st.lists(inside, min_size=clients, max_size=clients))
    weights = data.draw(st.lists(st.integers(1, heaviest), min_size=clients, max_size=clients))
    total = np.zeros(1, np.uint64)
    for value, weight in zip(values, weights, strict=True):
        total += encoded(coder, np.array([value], dtype), weight)
    pairs = list(zip(values, weights, strict=True))
    exact_sum = sum(Fraction(float(value)) * weight for value, weight in pairs)
    exact_mean = exact_sum / sum(weights)
    mean = Fraction(float(coder.decode(total, sum(weights))[0]))
    assert abs(mean - exact_mean) <= Fraction(coder.max_abs_error)


def test_the_bound_is_tight() -> None:
    coder = encoder(frac_bits=10, max_weight=1)
    half_a_step = 2.0**-11
    mean = coder.decode(encoded(coder, [half_a_step]), 1)
    assert 0.99 * coder.max_abs_error < abs(mean[0] - half_a_step) <= coder.max_abs_error


@pytest.mark.parametrize(
    ("ring", "guard", "clients", "weight", "bound", "places"),
    [
        (64, 8, 100, 10**4, 8.0, 32),
        (64, 8, 100, 10**5, 8.0, 28),
        (64, 8, 100, 10**6, 16.0, 24),
        (32, 1, 100, 1, 1.0, 23),
        (32, 1, 100, 500, 1.0, 14),
        (64, 8, 2**10, 2**17, 8.0, 24),  # an exact power of two: the closed form says 25
    ],
)
def test_auto_takes_as_many_places_as_fit(
    ring: int, guard: int, clients: int, weight: int, bound: float, places: int
) -> None:
    found = largest_frac_bits(
        ring_bits=ring, guard_bits=guard, units=clients * weight, value_bound=bound
    )
    assert found == places
    fits = encoder(
        ring_bits=ring,
        guard_bits=guard,
        max_clients=clients,
        max_weight=weight,
        value_bound=bound,
        frac_bits=places,
    )
    assert fits.max_total <= fits.capacity
    if places < 32:
        with pytest.raises(CapacityError, match=f"use frac_bits {places} or less"):
            encoder(
                ring_bits=ring,
                guard_bits=guard,
                max_clients=clients,
                max_weight=weight,
                value_bound=bound,
                frac_bits=places + 1,
            )


def test_capacity_is_exact_at_the_edge() -> None:
    edge = 2 ** (63 - 8) - 1
    keys = {"frac_bits": 0, "value_bound": 1.0, "max_clients": 1}
    assert encoder(**keys, max_weight=edge).max_total == edge
    with pytest.raises(CapacityError):
        encoder(**keys, max_weight=edge + 1)


def test_capacity_errors_name_a_wider_ring_or_smaller_numbers() -> None:
    keys = {"frac_bits": 0, "max_clients": 10**4, "max_weight": 10**5}
    with pytest.raises(CapacityError, match="use ring_bits: 64"):
        encoder(**keys, ring_bits=32)
    with pytest.raises(CapacityError, match="lower max_clients"):
        encoder(**{**keys, "max_weight": 10**16})


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_sum_does_not_wrap(ring: int, sign: float) -> None:
    coder = encoder(
        ring_bits=ring, guard_bits=1, max_clients=7, max_weight=3, value_bound=1.5, frac_bits=20
    )
    total = np.zeros(1, coder.dtype)
    for _ in range(7):
        total += encoded(coder, [sign * 1.5], 3)
    assert coder.decode(total, 21)[0] == sign * 1.5
    assert coder.in_range(total)


def test_nearest_rounding_takes_ties_to_even() -> None:
    coder = encoder(frac_bits=0)
    ring = encoded(coder, [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -0.0, 5e-324])
    assert ring.view(np.int64).tolist() == [0, 2, 2, 0, -2, -2, 0, 0]


@pytest.mark.parametrize("value", [0.3, -0.3, 0.999, -2.5])
def test_stochastic_rounding_is_unbiased(value: float) -> None:
    """Five sigma: false alarm below 1e-6 for each value."""
    coder = encoder(frac_bits=0, rounding="stochastic")
    n = 100_000
    ring = encoded(coder, np.full(n, value), rng=np.random.default_rng(1)).view(np.int64)
    assert set(ring.tolist()) <= {math.floor(value), math.ceil(value)}
    chance = value - math.floor(value)
    sigma = math.sqrt(chance * (1 - chance) / n)
    assert abs(ring.mean() - value) < 5 * sigma
    assert abs(ring.mean() - (value + 0.02)) > 5 * sigma  # the test sees a small bias


def test_stochastic_rounding_needs_its_own_stream() -> None:
    with pytest.raises(ValueError, match="generator of its own"):
        encoded(encoder(rounding="stochastic"), [0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", ["error", "clip"])
def test_non_finite_values_are_refused_under_every_policy(bad: float, policy: str) -> None:
    values = np.zeros(BLOCK_VALUES + 3)
    values[-1] = bad
    with pytest.raises(NonFiniteUpdateError, match="1 NaN or infinite") as caught:
        encoded(encoder(range_policy=policy), values, name="layer")
    assert caught.value.detail == {"tensor": "layer"}


def test_the_bound_itself_is_inside_and_the_next_number_is_not() -> None:
    coder = encoder()
    encoded(coder, [8.0, -8.0])
    for value in (np.nextafter(8.0, 9.0), np.nextafter(-8.0, -9.0)):
        with pytest.raises(
            ValueOutOfRangeError, match=r"above value_bound 8\.0; raise value_bound"
        ):
            encoded(coder, [value])


def test_clipping_counts_and_clips() -> None:
    coder = encoder(range_policy="clip")
    values = np.array([9.0, -1e30, 8.0, 0.25])
    out = np.empty(4, np.uint64)
    assert coder.encode_into(out, values, 1) == 2
    assert coder.decode(out, 1).tolist() == [8.0, -8.0, 8.0, 0.25]
    assert values[0] == 9.0  # the caller's array is untouched


@pytest.mark.parametrize("weight", [0, -1, 1001, 1.5, True, "3"])
def test_only_whole_weights_in_range_are_taken(weight: Any) -> None:
    with pytest.raises(InvalidWeightError, match="whole number from 1 to 1000"):
        encoder().check_weight(weight)


@given(size=st.integers(0, 5), extra=st.integers(-2, 2), ring=st.sampled_from([32, 64]))
@settings(max_examples=20, deadline=None)
def test_blocks_do_not_show(size: int, extra: int, ring: int) -> None:
    n = max(0, size * BLOCK_VALUES // 2 + extra)
    coder = encoder(ring_bits=ring, frac_bits=10, max_clients=2, max_weight=9, guard_bits=1)
    values = np.random.default_rng(n).uniform(-8, 8, n).astype(np.float32)
    whole = 7 * np.rint(values.astype(np.float64) * 2**10).astype(np.int64)
    ring_values = encoded(coder, values, 7)
    assert ring_values.view(coder.signed_dtype).tolist() == whole.tolist()


def test_more_clients_than_planned_are_a_capacity_error() -> None:
    settings_ = EncodingSettings(max_clients=4)
    with pytest.raises(CapacityError, match="raise max_clients"):
        FixedPointEncoder.from_settings(settings_, num_clients=5, weighted=False)


def test_uniform_weights_leave_more_places() -> None:
    settings_ = EncodingSettings(ring_bits=32)
    uniform = FixedPointEncoder.from_settings(settings_, num_clients=10, weighted=False)
    assert (uniform.max_weight, uniform.max_clients, uniform.frac_bits) == (1, 10, 16)
