"""One step on the grid: masses, domination, and equality with the closed form at grid points."""

import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest

from fedsim.accountant.loss_pmf import LossPmf, loss_variance, step_pmfs

CASES = [
    (0.2, 1.0, 2.0**-8),
    (0.01, 0.8, 2.0**-11),
    (0.5, 0.3, 2.0**-10),
    (0.9, 5.0, 2.0**-12),
    (1e-3, 50.0, 2.0**-20),
    (0.3, 0.05, 2.0**-6),
    (0.999999, 2.0, 2.0**-9),
    (1 - 1e-16, 0.1, 2.0**-9),
    (1.0, 0.7, 2.0**-7),
    (1.0, 0.02, 2.0**-3),
]


def exact_deltas(epsilon: float, rate: float, noise: float) -> tuple[float, float]:
    """delta of one step for (remove, add), from normal tails in 60 digits."""
    with mp.workdps(60):
        q, z, e = mp.mpf(rate), mp.mpf(noise), mp.mpf(epsilon)

        def above(x: Any) -> Any:
            return mp.erfc(x / z / mp.sqrt(2)) / 2

        def threshold(loss: Any) -> Any:
            tilt = (mp.exp(loss) - (1 - q)) / q
            return mp.mpf(0.5) + z * z * mp.log(tilt) if tilt > 0 else -mp.inf

        high, low = threshold(e), threshold(-e)
        remove = (1 - q) * above(high) + q * above(high - 1) - mp.exp(e) * above(high)
        add = mp.mpf(0)
        if low > -mp.inf:
            below, below_shifted = above(-low), above(1 - low)
            add = below - mp.exp(e) * ((1 - q) * below + q * below_shifted)
        return float(remove), float(add)


def delta_of(pmf: LossPmf, epsilon: float, spacing: float) -> float:
    loss = spacing * (pmf.first + np.arange(pmf.mass.size))
    return float(pmf.mass @ -np.expm1(np.minimum(epsilon - loss, 0.0))) + pmf.infinite


@pytest.mark.parametrize(("rate", "noise", "spacing"), CASES)
def test_guarantee_delta_equals_the_closed_form_at_grid_points_and_dominates_between(
    rate: float, noise: float, spacing: float
) -> None:
    pmfs = step_pmfs(rate, noise, spacing)
    top = pmfs[0].first + pmfs[0].mass.size
    for index in np.unique(np.linspace(0, 0.8 * top, 12).astype(int)):
        for offset in (0.0, 0.4):
            epsilon = (index + offset) * spacing
            exact = exact_deltas(epsilon, rate, noise)
            for ours, truth in zip(pmfs, exact, strict=True):
                delta = delta_of(ours, epsilon, spacing)
                assert delta >= truth * (1 - 1e-9) - 1e-15
                if offset == 0.0:
                    assert delta == pytest.approx(truth, rel=1e-8, abs=1e-14)


@pytest.mark.parametrize(("rate", "noise", "spacing"), CASES[:-1])  # the last overflows e^-loss
def test_masses_are_probabilities_under_both_distributions(
    rate: float, noise: float, spacing: float
) -> None:
    for pmf in step_pmfs(rate, noise, spacing):
        loss = spacing * (pmf.first + np.arange(pmf.mass.size))
        assert np.all(pmf.mass >= 0)
        assert pmf.mass.sum() + pmf.infinite == pytest.approx(1.0, abs=1e-14)
        assert float(pmf.mass @ np.exp(-loss)) == pytest.approx(1.0, abs=1e-11)


def test_variance_steers_the_grid() -> None:
    for rate, noise in ((0.01, 1.0), (0.3, 2.0), (1.0, 0.5)):
        pmf = step_pmfs(rate, noise, 2.0**-12)[0]
        loss = 2.0**-12 * (pmf.first + np.arange(pmf.mass.size))
        mean = float(pmf.mass @ loss)
        assert loss_variance(rate, noise) == pytest.approx(
            float(pmf.mass @ (loss - mean) ** 2), rel=1e-3
        )
    assert math.isfinite(loss_variance(0.5, 1e-5))
