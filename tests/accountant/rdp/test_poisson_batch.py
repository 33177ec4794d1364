"""The RDP kernel for many mechanisms: "remove" at 30 digits is in test_poisson.py."""

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, rdp_sampled_gaussian
from fedsim.accountant.rdp.poisson_batch import is_supported, log_moment_table, rdp_curves


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 0.6), (0.9, 0.5)])
def test_moments_of_the_other_direction(rate: float, noise: float) -> None:
    """log E_{N(0, z^2)}[r^exponent] from its definition, by the trapezoid rule in 30 digits."""
    exponents = np.array([-0.5, -48.0])
    ours = log_moment_table(np.array([rate]), np.array([noise]), exponents)[0]
    for exponent, value in zip(exponents, ours, strict=True):
        with mp.workdps(30):
            q, z, b = mp.mpf(rate), mp.mpf(noise), mp.mpf(exponent)
            step, total = min(z / 4, z * z / 5), mp.mpf(0)  # r^b has a pole pi z^2 off the axis
            for k in range(int((b - 11 * z) / step), int((2 + 11 * z) / step)):
                u = q * mp.expm1((2 * k * step - 1) / (2 * z * z))
                total += step * mp.npdf(k * step, 0, z) * ((1 + u) ** b - 1 - b * u)  # E[u] = 0
            assert abs(value / mp.log1p(total) - 1) < 1e-9


@given(
    mechanisms=st.lists(
        st.tuples(
            st.floats(-8.0, -1e-3).map(lambda x: 10.0**x),
            st.floats(-0.3, 2.5).map(lambda x: 10.0**x),
        ),
        min_size=1,
        max_size=30,
    )
)
@settings(max_examples=12, deadline=None)
def test_a_batch_is_its_mechanisms_one_by_one(mechanisms: list[tuple[float, float]]) -> None:
    rates, noises = np.array(mechanisms).T
    assert is_supported(rates, noises, DEFAULT_ORDERS).all()
    ours = rdp_curves(rates, noises, DEFAULT_ORDERS)
    single = [rdp_sampled_gaussian(rate, noise) for rate, noise in mechanisms]
    np.testing.assert_allclose(ours, np.array(single), rtol=1e-12)


def test_what_it_does_not_cover() -> None:
    rates = np.array([0.0, 1.0, 0.5, 0.5, 1e-200, 0.5])
    noises = np.array([1.0, 1.0, 0.1, 1e-200, 1.0, 1.0])
    assert is_supported(rates, noises, DEFAULT_ORDERS).tolist() == [False] * 5 + [True]


@pytest.mark.filterwarnings("error")
def test_only_whole_or_only_fractional_or_very_large_orders() -> None:
    rates, noises = np.array([0.1, 0.3]), np.array([1.0, 2.0])
    for orders in ((2.0, 3.0), (1.5,), (2.0, 2.5, 40000.0)):
        single = [rdp_sampled_gaussian(q, z, orders) for q, z in zip(rates, noises, strict=True)]
        np.testing.assert_allclose(rdp_curves(rates, noises, orders), single, rtol=1e-12)
