"""RDP to (epsilon, delta): tight, safe, and the two forms are inverses."""

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.rdp import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant.pld.privacy_profile import gaussian_epsilon
from fedsim.accountant.rdp.conversion import delta_from_rdp, epsilon_from_rdp
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, rdp_sampled_gaussian


def mironov(orders: np.ndarray, rdp: np.ndarray, delta: float) -> float:
    """The looser conversion of Mironov 2017, Proposition 3, written out."""
    return float(np.min(rdp + math.log(1 / delta) / (orders - 1)))


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.01, 1.0, 10_000), (0.2, 1.0, 200)])
def test_equals_dp_accounting_on_the_same_curve(rate: float, noise: float, steps: int) -> None:
    orders = tuple(float(k) for k in range(2, 65))
    rdp = steps * rdp_sampled_gaussian(rate, noise, orders)
    epsilon, order = epsilon_from_rdp(orders, rdp, 1e-5)
    expected, expected_order = compute_epsilon(orders, rdp.tolist(), 1e-5)
    assert epsilon == pytest.approx(expected, rel=1e-12)
    assert order == expected_order


@pytest.mark.parametrize("noise", [0.3, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
def test_lies_between_the_exact_gaussian_and_mironovs_conversion(
    noise: float, delta: float
) -> None:
    rdp = rdp_sampled_gaussian(1.0, noise)
    epsilon = epsilon_from_rdp(DEFAULT_ORDERS, rdp, delta)[0]
    assert gaussian_epsilon(1 / noise, delta) <= epsilon
    assert epsilon <= mironov(np.array(DEFAULT_ORDERS), rdp, delta)


def test_the_older_conversion_has_a_name() -> None:
    rdp = 10_000 * rdp_sampled_gaussian(0.01, 1.0)
    epsilon, order = epsilon_from_rdp(DEFAULT_ORDERS, rdp, 1e-5, "mironov")
    assert epsilon == pytest.approx(mironov(np.array(DEFAULT_ORDERS), rdp, 1e-5), rel=1e-14)
    assert delta_from_rdp(DEFAULT_ORDERS, rdp, epsilon, "mironov") == (
        pytest.approx(1e-5, rel=1e-9),
        order,
    )
    unknown: Any = "balle"
    for function in (epsilon_from_rdp, delta_from_rdp):
        with pytest.raises(ValueError, match=r"conversion must be one of \['tight', 'mironov'\]"):
            function(DEFAULT_ORDERS, rdp, 0.5, unknown)


def test_the_slips_of_the_article_are_not_reproduced() -> None:
    orders, delta = np.arange(2.0, 65.0), 1e-5
    rdp = 10_000 * rdp_sampled_gaussian(0.01, 1.0, orders.tolist())
    exact, ours = 6.1877, epsilon_from_rdp(orders.tolist(), rdp, delta)[0]
    parentheses = float(np.min(rdp + math.log(1 / delta) / orders - 1))
    index = float(np.min(((orders - 1) * rdp + math.log(1 / delta)) / orders))  # divides by alpha
    assert parentheses < exact < ours
    assert index == pytest.approx(5.60, abs=0.01)
    assert index < exact


def test_a_leak_is_taken_off_delta_and_added_to_it() -> None:
    rdp = rdp_sampled_gaussian(1.0, 2.0)
    epsilon, _ = epsilon_from_rdp(DEFAULT_ORDERS, rdp, 3e-5, leak=2e-5)
    alone, _ = epsilon_from_rdp(DEFAULT_ORDERS, rdp, 1e-5 / (1 - 2e-5))
    assert epsilon == pytest.approx(alone, rel=1e-12)
    assert delta_from_rdp(DEFAULT_ORDERS, rdp, epsilon, leak=2e-5)[0] == pytest.approx(3e-5)
    assert epsilon_from_rdp(DEFAULT_ORDERS, rdp, 2e-5, leak=2e-5)[0] == math.inf


@given(
    scale=st.floats(1e-8, 1e3),
    delta=st.floats(-30.0, -0.1).map(lambda exponent: 10.0**exponent),
)
@settings(max_examples=60, deadline=None)
def test_delta_undoes_epsilon(scale: float, delta: float) -> None:
    rdp = scale * np.array(DEFAULT_ORDERS)
    epsilon, _ = epsilon_from_rdp(DEFAULT_ORDERS, rdp, delta)
    back, _ = delta_from_rdp(DEFAULT_ORDERS, rdp, epsilon)
    assert epsilon >= 0.0
    assert back <= delta * (1 + 1e-8)
    if epsilon > 0.0:
        assert back == pytest.approx(delta, rel=1e-6)


def test_no_loss_and_infinite_loss() -> None:
    nothing, everything = np.zeros(2), np.full(2, math.inf)
    assert epsilon_from_rdp((2.0, 4.0), nothing, 1e-9)[0] == 0.0
    assert delta_from_rdp((2.0, 4.0), nothing, 0.0)[0] == 0.0
    assert epsilon_from_rdp((2.0, 4.0), everything, 1e-9)[0] == math.inf
    assert delta_from_rdp((2.0, 4.0), everything, 5.0)[0] == 1.0


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 1.1, math.nan])
def test_bad_delta_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta must"):
        epsilon_from_rdp((2.0,), np.ones(1), delta)


def test_bad_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got shapes \(1,\) and \(2,\)"):
        epsilon_from_rdp((2.0,), np.ones(2), 0.1)
    with pytest.raises(ValueError, match="length >= 1"):
        delta_from_rdp((), np.ones(0), 0.1)
    with pytest.raises(ValueError, match="epsilon must"):
        delta_from_rdp((2.0,), np.ones(1), -1.0)
