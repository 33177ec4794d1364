"""The bounds of one schedule: each is above the exact ε, and each is that of its own theorem."""

import math

import pytest

from fedsim.accountant import (
    EpochShuffled,
    FixedSizeSampled,
    Gaussian,
    NonPrivate,
    PldAccountant,
    PoissonSampled,
    RandomAllocation,
    RdpAccountant,
)
from fedsim.accountant.pld.privacy_profile import gaussian_epsilon
from fedsim.accountant.textbook.bounds import BOUNDS, USUAL_BOUNDS, choose_bounds

STEP, DELTA = PoissonSampled(0.01, Gaussian(4.0)), 1e-5


def epsilon(name: str, count: int, step: object = STEP, adjacency: object = "zero_out") -> object:
    return BOUNDS[name].epsilon([(step, count)], DELTA, adjacency)  # type: ignore[arg-type,list-item]


def test_the_published_figures_of_the_moments_accountant_come_out() -> None:
    # Abadi et al. 2016, section 3.1 and figure 2: ε = 1.26 after 100 epochs and 2.55 after 400.
    assert epsilon("moments", 10_000) == pytest.approx(1.26, abs=5e-3)
    assert epsilon("moments", 40_000) == pytest.approx(2.55, rel=0.011)
    # The published 9.34 and 24.22 of strong composition take q ε for the amplified ε, and the
    # classical noise beyond ε = 1; these are the proven values.
    assert epsilon("strong", 10_000) == pytest.approx(16.87, abs=5e-3)
    assert epsilon("strong", 40_000) == pytest.approx(50.85, abs=5e-3)


@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_no_bound_is_below_the_exact_value(count: int) -> None:
    exact = PldAccountant().compose(STEP, count).get_epsilon(DELTA)
    found = {name: epsilon(name, count) for name in BOUNDS}
    assert found["pld"] == exact
    assert found["rdp"] == RdpAccountant().compose(STEP, count).get_epsilon(DELTA)
    assert all(isinstance(one, float) and one >= exact * (1 - 1e-3) for one in found.values())
    assert found["optimal"] <= found["kov"] * 1.0005  # type: ignore[operator]


def test_a_pair_is_that_of_the_sampling() -> None:
    # One pass over shuffled data is one plain Gaussian; a share of delta goes to the theorem.
    shuffled = epsilon("basic", 1, EpochShuffled(10, Gaussian(2.0)))
    assert shuffled == pytest.approx(gaussian_epsilon(0.5, 0.999 * DELTA), rel=1e-12)
    # Without replacement under replace-one the sensitivity is 2 C.
    drawn = epsilon("basic", 1, FixedSizeSampled(100, 20, Gaussian(2.0)), "replace_one")
    base = gaussian_epsilon(1.0, 0.999 * DELTA / 0.2)
    assert drawn == pytest.approx(math.log1p(0.2 * math.expm1(base)), rel=1e-12)


def test_a_theorem_that_does_not_cover_the_steps_gives_nothing() -> None:
    other = [(STEP, 3), (PoissonSampled(0.01, Gaussian(2.0)), 3)]
    for name in ("basic", "strong", "kov", "optimal"):
        assert epsilon(name, 5, RandomAllocation(10, Gaussian(2.0))) is None
        assert epsilon(name, 5, STEP, "replace_one") is None  # no amplification there
        assert BOUNDS[name].epsilon(other, DELTA) is None
        assert BOUNDS[name].epsilon([(STEP, 2), (STEP, 3)], DELTA) == epsilon(name, 5)
    assert epsilon("pld", 5, FixedSizeSampled(9, 3, Gaussian(2.0))) is None


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    for bound in BOUNDS.values():
        assert bound.epsilon([], DELTA) == 0.0
        assert bound.epsilon([(NonPrivate(), 1)], DELTA) == math.inf


def test_bounds_are_chosen_by_name() -> None:
    assert [bound.name for bound in choose_bounds()] == list(USUAL_BOUNDS)
    (own,) = choose_bounds(["rdp"], orders=[4.0])
    assert own.epsilon([(STEP, 9)], DELTA) == RdpAccountant([4.0]).compose(STEP, 9).get_epsilon(
        DELTA
    )
    with pytest.raises(ValueError, match="no bound 'x'; there are basic, strong"):
        choose_bounds(["x"])
    with pytest.raises(ValueError, match="rdp is given twice"):
        choose_bounds(["rdp", "rdp"])
    with pytest.raises(ValueError, match="orders"):
        choose_bounds(["rdp"], orders=[1.0])
