"""One step on the grid: masses, domination, and equality with the closed form at grid points."""

import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest

from fedsim.accountant.composition import Approximate, FixedSizeGaussian, ReplacedGaussian
from fedsim.accountant.pld.loss_pmf import LossPmf, loss_variance, step_pmfs
from fedsim.accountant.pld.mechanisms import mechanism_pmfs, mechanism_range, mechanism_variance

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


def exact_replaced_delta(epsilon: float, rate: float, noise: float) -> float:
    """delta of (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1), from normal tails in 60 digits."""
    with mp.workdps(60):
        q, z, e = mp.mpf(rate), mp.mpf(noise), mp.exp(mp.mpf(epsilon))
        # The loss rises with x: solve for e^(x / z^2), a root of a quadratic equation.
        k, b = q * mp.exp(-1 / (2 * z * z)), (1 - q) * (e - 1)
        x = z * z * mp.log((b + mp.sqrt(b * b + 4 * k * k * e)) / (2 * k))

        def above(centre: int) -> Any:
            return mp.erfc((x - centre) / z / mp.sqrt(2)) / 2

        p = (1 - q) * above(0) + q * above(1)
        return float(p - e * ((1 - q) * above(0) + q * above(-1)))


MIRRORED = [
    *(ReplacedGaussian(rate, noise) for rate, noise, _ in CASES[:7]),
    *(FixedSizeGaussian(rate, 2 * noise) for rate, noise, _ in CASES[:7]),
    Approximate(1.0, 1e-3),
    Approximate(0.7123, 0.0),
    Approximate(1e-4, 0.5),
    Approximate(0.0, 0.25),
]


def exact_mirrored_delta(
    mechanism: ReplacedGaussian | FixedSizeGaussian | Approximate, epsilon: float
) -> float:
    if isinstance(mechanism, ReplacedGaussian):
        return exact_replaced_delta(epsilon, mechanism.sampling_rate, mechanism.noise_multiplier)
    if isinstance(mechanism, FixedSizeGaussian):
        return exact_deltas(epsilon, mechanism.sampling_rate, mechanism.noise_multiplier / 2)[0]
    gap = max(0.0, 1 - math.exp(epsilon - mechanism.epsilon))
    kept = gap / (1 + math.exp(-mechanism.epsilon))
    return mechanism.delta + (1 - mechanism.delta) * kept


@pytest.mark.parametrize("mechanism", MIRRORED)
def test_guarantee_pairs_that_mirror_themselves_dominate_and_agree_at_grid_points(
    mechanism: ReplacedGaussian | FixedSizeGaussian | Approximate,
) -> None:
    spacing = {mechanism: 2.0**-10 for mechanism in MIRRORED} | {
        MIRRORED[i + k]: CASES[i][2] for i in range(7) for k in (0, 7)
    }
    h = spacing[mechanism]
    pmf, other = mechanism_pmfs(mechanism, h)
    assert pmf is other
    loss = h * (pmf.first + np.arange(pmf.mass.size))
    assert np.all(pmf.mass >= 0)
    assert pmf.mass.sum() + pmf.infinite == pytest.approx(1.0, abs=1e-14)
    assert float(pmf.mass @ np.exp(-loss)) == pytest.approx(1 - pmf.infinite, abs=1e-11)
    assert loss[-1] >= mechanism_range(mechanism)[1] == -mechanism_range(mechanism)[0]
    # The mass at -l is e^-l times that at l: one pair in both orders.
    mirrored = (pmf.mass * np.exp(-loss))[::-1][: -pmf.first]
    np.testing.assert_allclose(pmf.mass[: -pmf.first], mirrored, rtol=1e-12, atol=1e-300)
    for index in np.unique(np.linspace(0, 0.8 * -pmf.first, 12).astype(int)):
        for offset in (0.0, 0.4):
            exact = exact_mirrored_delta(mechanism, (index + offset) * h)
            ours = delta_of(pmf, (index + offset) * h, h)
            assert ours >= exact * (1 - 1e-9) - 1e-15
            if offset == 0.0 and not isinstance(mechanism, Approximate):
                assert ours == pytest.approx(exact, rel=1e-8, abs=1e-14)


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("noise", [0.6, 2.0])
def test_the_mirrored_pair_dominates_every_pair_of_replacements(rate: float, noise: float) -> None:
    # The lemma in numbers: v and v' anywhere in the unit disc, in the plane, by brute force.
    generator = np.random.default_rng(7)
    step = noise / 8
    grid = np.arange(-1 - 7 * noise, 1 + 7 * noise, step)
    x, y = np.meshgrid(grid, grid)

    def density(vx: float, vy: float) -> np.ndarray:
        normal = np.exp(-0.5 * ((x - vx) ** 2 + (y - vy) ** 2) / noise**2)
        return normal * (step / noise) ** 2 / (2 * math.pi)

    for _ in range(12):
        angles = generator.uniform(0, 2 * math.pi, 2)
        radii = generator.choice([1.0, 1.0, 0.5, 0.0], 2)
        v, w = (
            rate * density(r * math.cos(a), r * math.sin(a))
            for r, a in zip(radii, angles, strict=True)
        )
        rest = (1 - rate) * density(0.0, 0.0)
        for epsilon in (0.0, 0.1, 0.7, 2.0):
            delta = np.maximum(rest + v - math.exp(epsilon) * (rest + w), 0.0).sum()
            assert delta <= exact_replaced_delta(epsilon, rate, noise) + 1e-3 * rate * step


def test_variances_of_the_mirrored_pairs_have_the_right_size() -> None:
    for mechanism in MIRRORED[:14]:
        h = 2.0**-9
        pmf, _ = mechanism_pmfs(mechanism, h)
        loss = h * (pmf.first + np.arange(pmf.mass.size))
        variance = float(pmf.mass @ loss**2) - float(pmf.mass @ loss) ** 2
        if variance > h:
            assert 0.2 < mechanism_variance(mechanism) / variance < 5


def test_a_huge_replaced_loss_is_still_a_distribution() -> None:
    pmf, _ = mechanism_pmfs(ReplacedGaussian(0.3, 0.02), 2.0**-6)
    assert pmf.mass.sum() + pmf.infinite == pytest.approx(1.0, abs=1e-12)
    assert delta_of(pmf, 1000.0, 2.0**-6) == pytest.approx(
        exact_replaced_delta(1000.0, 0.3, 0.02), rel=1e-6
    )


def test_variance_steers_the_grid() -> None:
    for rate, noise in ((0.01, 1.0), (0.3, 2.0), (1.0, 0.5)):
        pmf = step_pmfs(rate, noise, 2.0**-12)[0]
        loss = 2.0**-12 * (pmf.first + np.arange(pmf.mass.size))
        mean = float(pmf.mass @ loss)
        assert loss_variance(rate, noise) == pytest.approx(
            float(pmf.mass @ (loss - mean) ** 2), rel=1e-3
        )
    assert math.isfinite(loss_variance(0.5, 1e-5))
