"""The losses of random allocation against integrals of their own and against samples."""

import math
from inspect import unwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, ndtr

from fedsim.accountant import (
    EpochShuffled,
    Gaussian,
    PldAccountant,
    PoissonSampled,
    RandomAllocation,
    RdpAccountant,
)
from fedsim.accountant.pld import mechanisms as module
from fedsim.accountant.pld.mechanisms import allocation_pmfs


def accountant(batches: int, z: float, passes: int = 1) -> PldAccountant:
    return PldAccountant().compose(RandomAllocation(batches, Gaussian(z)), passes)


def exact_deltas(batches: int, z: float, epsilon: float) -> tuple[float, float]:
    """Return delta of "remove" and "add" of 2 or 3 batches, by integrals over all ratios but one.

    Given the other ratios, a hockey stick of the last one is the price of an option on it.
    """
    nodes = np.linspace(-9.5, 9.5, 2001 if batches == 2 else 201)
    weights = np.exp(-0.5 * nodes**2)
    weights /= weights.sum()
    ratios = np.exp(nodes / z - 0.5 / z / z)
    others, probability = ratios, weights
    if batches == 3:
        others = np.add.outer(ratios, ratios).ravel()
        probability = np.multiply.outer(weights, weights).ravel()
    call, _ = option_prices(batches * math.exp(epsilon) - others, z)
    remove = float(probability @ call) / batches
    _, put = option_prices(batches * math.exp(-epsilon) - others, z)
    add = float(probability @ put) * math.exp(epsilon) / batches
    return remove, add


def option_prices(strike: np.ndarray, z: float) -> tuple[np.ndarray, np.ndarray]:
    """Return E[(w - k)_+] and E[(k - w)_+] of one ratio w, log w ~ N(-1/(2 z^2), 1/z^2)."""
    k = np.maximum(strike, 1e-300)
    d = (-np.log(k) + 0.5 / z / z) * z
    call, put = ndtr(d) - k * ndtr(d - 1 / z), k * ndtr(1 / z - d) - ndtr(-d)
    sure = strike <= 0.0  # the option is always, or never, exercised
    return np.where(sure, 1.0 - strike, call), np.where(sure, 0.0, put)


@pytest.mark.parametrize("batches", [2, 3])
@pytest.mark.parametrize("z", [0.8, 1.3, 4.0])
def test_delta_is_never_below_the_integral_and_close_to_it(batches: int, z: float) -> None:
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
        exact = max(exact_deltas(batches, z, epsilon))
        if exact > 1e-9:  # less is below what the discrete loss resolves
            delta = accountant(batches, z).get_delta(epsilon)
            assert exact * (1 - 1e-6) <= delta <= exact * 1.03


def test_both_directions_are_dominated_by_the_grid() -> None:
    """ "add" is the smaller one here, so the accountant's maximum alone would not show it."""
    spacing = 2.0**-8
    for pmf, exact in zip(allocation_pmfs(3, 1.0, spacing), exact_deltas(3, 1.0, 0.5), strict=True):
        loss = spacing * (pmf.first + np.arange(pmf.mass.size))
        delta = float(pmf.mass @ np.maximum(0.0, -np.expm1(0.5 - loss))) + pmf.infinite
        assert exact <= delta <= exact * 1.02


def sampled_losses(batches: int, z: float, passes: int) -> np.ndarray:
    """Return 40,000 samples of the loss of "remove"."""
    generator = np.random.default_rng(20261123)
    loss = np.zeros(40_000)
    for _ in range(passes):
        x = z * generator.standard_normal((loss.size, batches))
        x[:, 0] += 1.0
        loss += np.asarray(logsumexp((x - 0.5) / z / z, axis=1)) - math.log(batches)
    return loss


@pytest.mark.parametrize(("batches", "z", "passes"), [(18, 1.0, 5), (100, 0.7, 3)])
def test_samples_of_the_dominating_pair_agree(batches: int, z: float, passes: int) -> None:
    """Six standard errors: a false alarm in 1e9. Noise that is 5 % larger is found."""
    delta, losses = 0.02, sampled_losses(batches, z, passes)

    def standard_errors_above(epsilon: float) -> float:
        gain = np.maximum(0.0, -np.expm1(epsilon - losses))
        return float((gain.mean() - delta) / (gain.std() / math.sqrt(losses.size)))

    assert abs(standard_errors_above(accountant(batches, z, passes).get_epsilon(delta))) < 6.0
    too_low = accountant(batches, 1.05 * z, passes).get_epsilon(delta)
    assert standard_errors_above(too_low) > 6.0


def test_the_grid_costs_less_than_one_percent_of_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many points again take away 5/9 of what is proportional to the squared spacing."""
    monkeypatch.setattr(module, "_mean_ratio", unwrap(module._mean_ratio))  # without its cache

    def epsilon() -> float:
        pmf, _ = unwrap(allocation_pmfs)(64, 0.7, 2.0**-8)
        loss = 2.0**-8 * (pmf.first + np.arange(pmf.mass.size))
        deltas = [float(pmf.mass @ np.maximum(0.0, -np.expm1(e - loss))) for e in loss[loss > 0]]
        return float(loss[loss > 0][np.searchsorted(-np.array(deltas), -1e-5)])

    usual = epsilon()
    monkeypatch.setattr(module, "_POINTS", 960)
    assert 0.9945 * usual <= epsilon() <= usual + 2.0**-8


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.01, 1.0)), min_size=1, max_size=20),
    st.lists(st.floats(0.1, 40.0), min_size=2, max_size=10, unique=True),
    st.floats(0.0, 60.0),
)
def test_a_spread_keeps_the_mean_and_lowers_no_hockey_stick(
    pairs: list[tuple[float, float]], points: list[float], strike: float
) -> None:
    values, masses = (np.array(part) for part in zip(*pairs, strict=True))
    masses /= masses.sum()
    mean = float(masses @ values)
    spread = module._spread(values, masses, np.sort(points), 0.0, mean)
    assert spread.masses.min() >= 0.0
    assert float(spread.masses.sum()) == pytest.approx(1.0)
    assert float(spread.masses @ spread.values) + spread.infinite == pytest.approx(mean)
    before = float(masses @ np.maximum(values - strike, 0.0))
    after = float(spread.masses @ np.maximum(spread.values - strike, 0.0)) + spread.infinite
    assert after >= before - 1e-9


def test_the_table_of_the_accounting_page_is_computed() -> None:
    page = Path(__file__).parents[3] / "docs/explain/privacy_accounting.md"
    header = "| batches a pass b | z | passes |"
    lines = page.read_text().split(header)[1].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == 3
    for line in lines:
        batches, z, passes, *epsilons = (float(cell) for cell in line.strip("| ").split("|"))
        b, t, noise = int(batches), int(passes), Gaussian(z)
        found = [
            accountant(b, z, t).get_epsilon(1e-5),
            RdpAccountant().compose(RandomAllocation(b, noise), t).get_epsilon(1e-5),
            PldAccountant().compose(PoissonSampled(1 / b, noise), b * t).get_epsilon(1e-5),
            PldAccountant().compose(EpochShuffled(b, noise), t).get_epsilon(1e-5),
        ]
        for value, written, unit in zip(found, epsilons, (0.01, 0.01, 0.01, 0.1), strict=True):
            assert value <= written < value + unit  # rounded up


@pytest.mark.parametrize(("batches", "z"), [(7, 0.1), (7, 0.199), (3, 2e4), (2**45, 1.0)])
def test_outside_the_grid_the_bound_is_that_of_less_noise_or_fewer_batches(
    batches: int, z: float
) -> None:
    epsilon = accountant(batches, z).get_epsilon(1e-7)
    assert 0.0 <= epsilon <= PldAccountant().compose(Gaussian(min(z, 1e4))).get_epsilon(1e-7)


def test_epsilon_falls_with_noise_and_batches_and_rises_with_passes() -> None:
    def epsilon(batches: int, z: float, passes: int) -> float:
        return accountant(batches, z, passes).get_epsilon(1e-6)

    by_noise = [epsilon(20, z, 3) for z in (0.7, 1.0, 1.01)]
    by_batches = [epsilon(b, 1.0, 3) for b in (3, 18, 20)]
    assert by_noise == sorted(by_noise, reverse=True)
    assert by_batches == sorted(by_batches, reverse=True)
    assert epsilon(20, 1.0, 1) < epsilon(20, 1.0, 2) < epsilon(20, 1.0, 10)
