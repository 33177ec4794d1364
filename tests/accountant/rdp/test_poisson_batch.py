"""The fast RDP kernel against integrals at 30 digits and against the kernel for one mechanism."""

from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, rdp_sampled_gaussian
from fedsim.accountant.rdp.poisson_batch import is_supported, log_moment_table, rdp_curves


def log_moment(rate: float, noise: float, exponent: float) -> Any:
    """log E_{N(0, z^2)}[r^exponent] from its definition, 30 digits."""
    with mp.workdps(30):
        q, z, b = mp.mpf(rate), mp.mpf(noise), mp.mpf(exponent)

        def integrand(x: Any) -> Any:
            u = q * mp.expm1((2 * x - 1) / (2 * z * z))
            return mp.npdf(x, 0, z) * ((1 + u) ** b - 1 - b * u)  # E[r] = 1

        low, high = min(0, b) - 14 * z, max(2, b) + 14 * z
        points = [low + (high - low) * k / 24 for k in range(25)]
        return mp.log1p(mp.quad(integrand, points))


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (1e-5, 50.0)])
def test_moments_against_the_definition(rate: float, noise: float) -> None:
    exponents = np.array([1.05, 10.75])
    ours = log_moment_table(np.array([rate]), np.array([noise]), exponents)[0]
    for exponent, value in zip(exponents, ours, strict=True):
        assert value == pytest.approx(float(log_moment(rate, noise, exponent)), rel=1e-12)


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 0.6), (0.9, 0.5)])
def test_moments_of_the_other_direction(rate: float, noise: float) -> None:
    exponents = np.array([-0.5, -48.0])
    ours = log_moment_table(np.array([rate]), np.array([noise]), exponents)[0]
    for exponent, value in zip(exponents, ours, strict=True):
        assert value == pytest.approx(float(log_moment(rate, noise, exponent)), rel=1e-9)


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
@settings(max_examples=20, deadline=None)
def test_equals_the_kernel_for_one_mechanism(mechanisms: list[tuple[float, float]]) -> None:
    rates, noises = np.array(mechanisms).T
    assert is_supported(rates, noises, DEFAULT_ORDERS).all()
    ours = rdp_curves(rates, noises, DEFAULT_ORDERS)
    single = [rdp_sampled_gaussian(rate, noise) for rate, noise in mechanisms]
    np.testing.assert_allclose(ours, np.array(single), rtol=1e-12)


def test_a_batch_is_its_mechanisms_one_by_one() -> None:
    rng = np.random.default_rng(0)
    rates, noises = rng.uniform(0.01, 0.9, 200), rng.uniform(0.5, 30.0, 200)
    whole = rdp_curves(rates, noises, DEFAULT_ORDERS)
    parts = [rdp_curves(rates[i : i + 1], noises[i : i + 1], DEFAULT_ORDERS) for i in range(200)]
    np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-13)


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
