"""The PLD accountant against an exact inversion, dp-accounting and closed forms."""

import math
import random

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp

from fedsim.accountant import (
    Adjacency,
    EpsilonDelta,
    FixedSizeSampled,
    Gaussian,
    PldAccountant,
    PoissonSampled,
    RdpAccountant,
    make_accountant,
)
from fedsim.accountant.composition import SampledGaussian
from fedsim.accountant.pld import distribution as pld
from fedsim.accountant.pld.fourier import circular, power
from fedsim.accountant.pld.privacy_profile import DeltaCurve, gaussian_epsilon, gaussian_log_delta
from fedsim.accountant.textbook.classical import optimal_composition

Schedule = tuple[tuple[float, float, int], ...]  # (sampling rate, noise multiplier, steps)

SCHEDULES: tuple[Schedule, ...] = (
    ((0.2, 1.0, 200),),
    ((0.01, 1.0, 10_000),),
    ((0.1, 4.0, 1000),),
    ((0.01, 0.8, 100),),
    ((0.9, 1.0, 10),),
    ((0.5, 0.5, 50),),
    ((1e-2, 20.0, 10_000),),
    ((0.2, 1.0, 50), (0.05, 0.7, 100), (0.3, 2.0, 200)),
    ((1.0, 3.0, 4), (0.1, 1.0, 30)),
)


def account(schedule: Schedule) -> PldAccountant:
    accountant = PldAccountant()
    for rate, noise, steps in schedule:
        accountant.compose(PoissonSampled(rate, Gaussian(noise)), steps)
    return accountant


def log_moments(
    schedule: Schedule, powers: np.ndarray, shift: int, replaced: bool = False
) -> np.ndarray:
    """log of the product over steps of E_Q[(P/Q)^(powers + 1 or -powers)], by the trapezoid rule.

    Q is N(0, z^2), or (1-q) N(0, z^2) + q N(-1, z^2) where an example is replaced.
    """
    exponents = powers + 1 if shift else -powers
    total = np.zeros(powers.shape, complex)
    for rate, noise, steps in schedule:
        step = min(noise / 10, noise * noise / 3)
        x = np.arange(-16 * noise - replaced, 60 * noise, step)
        rest = math.log1p(-rate) if rate < 1 else -np.inf
        log_r = np.logaddexp(rest, math.log(rate) + (x - 0.5) / noise**2)
        log_weight = -0.5 * (x / noise) ** 2 + math.log(step / noise / math.sqrt(2 * math.pi))
        if replaced:
            log_q = np.logaddexp(rest, math.log(rate) + (-x - 0.5) / noise**2)
            log_r, log_weight = log_r - log_q, log_weight + log_q
        terms = log_weight + exponents[:, None] * log_r
        top = np.real(terms).max(axis=1, keepdims=True)
        total += steps * (top[:, 0] + np.log(np.exp(terms - top).sum(axis=1)))
    return total


def exact_log_delta(schedule: Schedule, epsilon: float, replaced: bool = False) -> float:
    """log delta by inverting the Laplace transform of the privacy profile, both directions.

    delta = 1/(2 pi i) * integral over Re s = c of exp(K(s) - s epsilon) / (s (s + 1)) ds, K the
    log moment generating function of the loss (Zhu, Dong, Wang 2022; Alghamdi et al. 2023). No
    grid of losses and no truncation is involved: an independent computation.
    """
    remove = _invert(schedule, epsilon, 1, replaced)
    if replaced:  # both orders of the pair are alike
        return remove
    slopes = 2.0 ** np.arange(-8, 9)
    chernoff = (np.real(log_moments(schedule, slopes, 0)) - slopes * epsilon).min()
    return remove if chernoff < remove else max(remove, _invert(schedule, epsilon, 0))


def _invert(schedule: Schedule, epsilon: float, shift: int, replaced: bool = False) -> float:
    def exponent(s: np.ndarray) -> np.ndarray:
        moments = log_moments(schedule, s, shift, replaced)
        return moments - s * epsilon - np.log(s) - np.log(s + 1)

    # Any c > 0 is right; near the saddle point the integrand does not cancel.
    axis = 2.0 ** np.arange(-12, 9, 1 / 32)
    heights = np.real(exponent(axis))
    best = int(np.clip(heights.argmin(), 1, axis.size - 2))
    c, peak = axis[best], float(heights[best])
    slope = np.gradient(heights, axis)
    width = 1 / math.sqrt(float(np.gradient(slope, axis)[best]))
    result, previous, step = math.nan, math.inf, width / 4
    while abs(result - previous) > 1e-11 * abs(previous) or math.isnan(result):
        previous, total, start = result, 0.0, 0
        while True:
            y = step * np.arange(start, start + 256)
            values = np.real(np.exp(exponent(c + 1j * y) - peak))
            total += values.sum() - (0.5 * values[0] if start == 0 else 0.0)
            start += 256
            if np.abs(values).max() < 1e-13:
                break
            if start > 40_000:
                pytest.fail("the inversion does not converge: choose another schedule")
        result, step = total * step / math.pi, step / 2
    return peak + math.log(result)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("delta", [1e-3, 1e-8])
def test_guarantee_never_below_the_exact_epsilon_and_at_most_1e_3_above(
    schedule: Schedule, delta: float
) -> None:
    epsilon = account(schedule).get_epsilon(delta)
    assert epsilon > 0
    assert exact_log_delta(schedule, epsilon) <= math.log(delta) + 1e-9
    # At an epsilon smaller by the allowed excess, the exact delta is already above delta.
    excess = min(1e-3, 0.01 * epsilon)
    assert exact_log_delta(schedule, epsilon - excess) > math.log(delta)


def random_schedule(draw: random.Random, mechanisms: int) -> Schedule:
    """Rates, noises and steps of the inverted transform's range: it needs many steps."""
    steps = []
    for _ in range(mechanisms):
        rate = 10.0 ** draw.uniform(-2.0, -0.05)
        noise = 10.0 ** draw.uniform(-0.1, 0.8)
        steps.append((rate, noise, int(10.0 ** draw.uniform(1.7, 3.5))))
    if mechanisms > 1 and draw.random() < 0.5:
        steps.append((1.0, 10.0 ** draw.uniform(0.3, 1.0), draw.randint(1, 20)))
    return tuple(steps)


@pytest.mark.long
@pytest.mark.parametrize(("mechanisms", "schedules"), [(1, 32), (3, 8)])
def test_guarantee_random_schedules_are_nowhere_below_the_exact_epsilon(
    mechanisms: int, schedules: int
) -> None:
    """160 values of single mechanisms, and 40 of compositions; Rényi's bound is above them."""
    draw = random.Random(mechanisms)
    for _ in range(schedules):
        schedule = random_schedule(draw, mechanisms)
        ours, rdp = account(schedule), RdpAccountant()
        for rate, noise, steps in schedule:
            rdp.compose(PoissonSampled(rate, Gaussian(noise)), steps)
        for delta in (1e-2, 1e-4, 1e-5, 1e-7, 1e-9):
            epsilon = ours.get_epsilon(delta)
            assert epsilon <= rdp.get_epsilon(delta) + 1e-9
            exact = exact_log_delta(schedule, epsilon) if epsilon > 0.0 else -math.inf
            assert exact <= math.log(delta) + 1e-9, (schedule, delta)
            assert epsilon == 0.0 or exact >= math.log(delta) - 0.05, (schedule, delta)


@pytest.mark.parametrize("schedule", [*SCHEDULES[:3], *SCHEDULES[5:8]])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_guarantee_replaced_never_below_the_exact_epsilon_and_at_most_1e_3_above(
    schedule: Schedule, delta: float
) -> None:
    accountant = PldAccountant(adjacency="replace_one")
    for rate, noise, steps in schedule:
        accountant.compose(PoissonSampled(rate, Gaussian(noise)), steps)
    epsilon = accountant.get_epsilon(delta)
    assert exact_log_delta(schedule, epsilon, True) <= math.log(delta) + 1e-9
    excess = min(1e-3, 0.01 * epsilon)
    assert exact_log_delta(schedule, epsilon - excess, True) > math.log(delta)


def test_replaced_equals_dp_accounting() -> None:
    theirs = oracle.from_gaussian_mechanism(
        1.0,
        value_discretization_interval=5e-4,
        sampling_prob=0.01,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    ).self_compose(1000)
    ours = PldAccountant(adjacency="replace_one")
    ours.compose(PoissonSampled(0.01, Gaussian(1.0)), 1000)
    for delta in (1e-3, 1e-5, 1e-7):
        assert ours.get_epsilon(delta) == pytest.approx(
            theirs.get_epsilon_for_delta(delta), abs=3e-4
        )
    assert ours.get_epsilon(1e-5) == pytest.approx(2.843, abs=1e-3)  # 1.83 where one is removed


def test_without_replacement_lies_between_its_lower_bound_and_rdp() -> None:
    # 1 of 100, z = 2: Poisson at z/2 is attained by some data; RDP is 2.457.
    event = FixedSizeSampled(100, 1, Gaussian(2.0))
    ours = PldAccountant(adjacency="replace_one").compose(event, 1000).get_epsilon(1e-5)
    rdp = RdpAccountant(adjacency="replace_one").compose(event, 1000).get_epsilon(1e-5)
    lower = account(((0.01, 1.0, 1000),)).get_epsilon(1e-5)
    assert (lower, ours, rdp) == pytest.approx((1.8283, 2.1989, 2.4565), abs=2e-4)
    one = PldAccountant(adjacency="replace_one").compose(event).get_delta(0.1)
    assert one == pytest.approx(account(((0.01, 1.0, 1),)).get_delta(0.1), rel=1e-3)


@pytest.mark.parametrize(
    ("epsilon", "delta", "count"), [(0.1, 0.0, 100), (0.25, 1e-7, 9), (1, 0, 3)]
)
def test_composed_guarantees_equal_the_optimal_composition(
    epsilon: float, delta: float, count: int
) -> None:
    ours = PldAccountant().compose(EpsilonDelta(epsilon, delta), count)
    for i in range(0, count // 2, 3):
        at = (count - 2 * i) * epsilon
        spent = ours.get_delta(at) * (1 + 1e-9) + 1e-15
        assert optimal_composition(epsilon, delta, count, spent) <= at * (1 + 1e-9)
        tighter = (spent - 2e-12) / 1.05
        if tighter > 0.0:  # no smaller δ than the optimal one
            assert optimal_composition(epsilon, delta, count, tighter) >= at * (1 - 1e-9)
    rdp = RdpAccountant().compose(EpsilonDelta(epsilon, delta), count)
    assert ours.get_epsilon(1e-3) <= rdp.get_epsilon(1e-3) * (1 + 1e-9)
    assert ours.get_epsilon(1e-5) <= count * epsilon + 1e-3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("epsilon", [0.0, 1e-300, 1e-9, 1e-3, 800.0, 1e5, 1e300])
@pytest.mark.parametrize("delta", [0.0, 1e-12, 1 - 1e-16])
def test_extreme_guarantees_give_bounds_without_warnings(epsilon: float, delta: float) -> None:
    for name in ("pld", "rdp", "moments"):
        ours = make_accountant(name).compose(EpsilonDelta(epsilon, delta), 2)
        if delta < 1e-5:
            # The moments accountant cannot say 0: log(1/delta) / 31 remains.
            least = 0.38 if name == "moments" else 1e-2
            assert 0.0 <= ours.get_epsilon(1e-5) <= max(2 * epsilon * (1 + 1e-3), least)
        else:
            assert ours.get_epsilon(1e-5) == math.inf
        assert 0.0 <= ours.get_delta(1.0) <= 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [5e-324, 0.3, 1 - 1e-16])
@pytest.mark.parametrize("noise", [1e-200, 0.1, 1e300])
def test_extreme_steps_under_replace_one(rate: float, noise: float) -> None:
    event = PoissonSampled(rate, Gaussian(noise))
    ours, rdp = (
        make_accountant(name, adjacency="replace_one").compose(event, 3) for name in ("pld", "rdp")
    )
    assert 0.0 <= ours.get_epsilon(1e-5) <= rdp.get_epsilon(1e-5) * (1 + 1e-6)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.3, 2.0)])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_epsilon_never_falls_when_a_step_is_added(
    rate: float, noise: float, adjacency: Adjacency
) -> None:
    # The grid changes several times on the way; 1e-9 is left for rounding.
    event, accountant = PoissonSampled(rate, Gaussian(noise)), PldAccountant(adjacency=adjacency)
    spacings, last = set(), 0.0
    for _ in range(150):
        epsilon = accountant.compose(event).get_epsilon(1e-5)
        assert epsilon >= last * (1 - 1e-9)
        last = epsilon
        steps = pld._dominated(pld._normalise(tuple(accountant.steps.items())))
        assert steps is not None
        spacings.add(pld._grid(steps)[0])
    assert len(spacings) > 2


def test_where_a_grid_gives_way_both_are_mixed() -> None:
    kind = SampledGaussian(0.01, 1.0)
    grids = [pld._grid(((kind, steps),)) for steps in range(1000, 9000, 10)]
    shares = [share for _, share in grids]
    assert min(shares) == 0.0
    assert max(shares) > 0.9
    steps = 1000 + 10 * shares.index(max(shares))
    ours = account(((0.01, 1.0, steps),)).get_epsilon(1e-5)
    assert exact_log_delta(((0.01, 1.0, steps),), ours) <= math.log(1e-5) + 1e-9
    assert exact_log_delta(((0.01, 1.0, steps),), ours - 5e-4) > math.log(1e-5)


@given(
    noises=st.lists(st.tuples(st.floats(0.3, 30.0), st.integers(1, 50)), min_size=1, max_size=3),
    delta=st.sampled_from([1e-2, 1e-5, 1e-9, 1e-40]),
)
@settings(max_examples=40, deadline=None)
def test_without_sampling_it_is_the_exact_gaussian(
    noises: list[tuple[float, int]], delta: float
) -> None:
    accountant = PldAccountant()
    for noise, count in noises:
        accountant.compose(Gaussian(noise), count)
    mu = math.sqrt(math.fsum(count / noise**2 for noise, count in noises))
    epsilon = accountant.get_epsilon(delta)
    assert epsilon == pytest.approx(gaussian_epsilon(mu, delta), rel=1e-9, abs=1e-12)
    assert accountant.get_delta(2.0) == pytest.approx(math.exp(gaussian_log_delta(mu, 2.0)), 1e-9)


def test_a_rate_near_1_tends_to_the_gaussian() -> None:
    sampled = account(((1 - 1e-12, 2.0, 20),)).get_epsilon(1e-5)
    assert sampled == pytest.approx(gaussian_epsilon(math.sqrt(20) / 2, 1e-5), abs=2e-4)


schedules = st.lists(
    st.tuples(st.floats(1e-4, 0.9), st.floats(0.4, 20.0), st.integers(1, 2000)),
    min_size=1,
    max_size=2,
).map(tuple)


@given(schedule=schedules, delta=st.floats(-8.0, -2.0).map(lambda exponent: 10.0**exponent))
@settings(max_examples=10, deadline=None)
def test_below_rdp_and_delta_undoes_epsilon(schedule: Schedule, delta: float) -> None:
    ours, rdp = account(schedule), RdpAccountant()
    for event, count in ours.history:
        rdp.compose(event, count)
    epsilon = ours.get_epsilon(delta)
    assert epsilon <= rdp.get_epsilon(delta) + 1e-3
    assert ours.get_delta(epsilon) <= delta * (1 + 1e-9)
    if epsilon > 0:
        assert ours.get_delta(epsilon) == pytest.approx(delta, rel=1e-6)
        assert ours.get_delta(epsilon * 0.999) > delta * (1 - 1e-9)


@given(
    rate=st.floats(1e-3, 0.5),
    noise=st.floats(0.5, 5.0),
    steps=st.integers(1, 500),
    delta=st.sampled_from([1e-3, 1e-5, 1e-7]),
)
@settings(max_examples=8, deadline=None)
def test_monotone_in_steps_rate_noise_and_delta(
    rate: float, noise: float, steps: int, delta: float
) -> None:
    slack = 2e-4  # the grid may change from one schedule to the next
    epsilon = account(((rate, noise, steps),)).get_epsilon(delta)
    assert account(((rate, noise, steps + 5),)).get_epsilon(delta) >= epsilon - slack
    assert account(((rate * 1.2, noise, steps),)).get_epsilon(delta) >= epsilon - slack
    assert account(((rate, noise / 1.2, steps),)).get_epsilon(delta) >= epsilon - slack
    assert account(((rate, noise, steps),)).get_epsilon(delta / 3) >= epsilon


@pytest.mark.skipif(bool(np.finfo(np.longdouble).eps > 1e-18), reason="no extended precision here")
@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.2, 1.0, 200), (0.01, 1.0, 10_000)])
def test_guarantee_the_noise_added_to_delta_covers_the_rounding_of_the_fft(
    rate: float, noise: float, steps: int
) -> None:
    kinds = ((SampledGaussian(rate, noise), steps),)
    spacing = pld._grid(kinds)[0]
    for direction in (0, 1):
        low, high = pld._window(kinds, spacing, direction)
        size = pld._reused_size(high - low + 1)
        spectrum = pld._spectrum(kinds[0][0], spacing, direction, size)
        single = np.fft.irfft(spectrum, size)
        rough, bound = circular(power(np.fft.rfft(single), steps), size, steps)
        precise = np.fft.rfft(single.astype(np.longdouble)) ** steps
        error = np.abs(rough - np.fft.irfft(precise, size)).sum()
        assert 0 < error < 0.7 * bound


def test_a_delta_that_the_fft_cannot_resolve_is_answered_by_rdp() -> None:
    schedule = ((0.01, 1.0, 100),)
    ours = account(schedule)
    rdp = RdpAccountant().compose(PoissonSampled(0.01, Gaussian(1.0)), 100)
    assert ours.get_epsilon(1e-30) == rdp.get_epsilon(1e-30)
    assert ours.get_delta(20.0) == rdp.get_delta(20.0) < 1e-30
    assert ours.get_epsilon(1e-11) < 0.99 * rdp.get_epsilon(1e-11)


def test_a_loss_too_wide_for_the_grid_is_answered_by_rdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its single step or by their composition; the latter is cached under no other test's."""
    monkeypatch.setattr(pld, "_MAX_POINTS", 1 << 8)
    for schedule in (((0.5, 0.001, 100),), ((0.123, 1.0, 100),)):
        rdp = RdpAccountant().compose(*account(schedule).history[0])
        assert account(schedule).get_epsilon(1e-5) == rdp.get_epsilon(1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [5e-324, 0.3, 1 - 1e-16])
@pytest.mark.parametrize("noise", [1e-200, 1e-3, 0.1, 1e5, 1e300])
def test_extreme_steps_give_a_bound_without_warnings(rate: float, noise: float) -> None:
    ours, rdp = account(((rate, noise, 3),)), RdpAccountant()
    rdp.compose(PoissonSampled(rate, Gaussian(noise)), 3)
    assert 0.0 <= ours.get_epsilon(1e-5) <= rdp.get_epsilon(1e-5) * (1 + 1e-6)


def test_a_hand_made_loss_distribution() -> None:
    # Losses 0, 0.5, 1 with probabilities 0.5, 0.3, 0.2 and 0.01 of delta that is simply there.
    curve = DeltaCurve.of(0, 0.5, np.array([0.5, 0.3, 0.2]), 0.01)
    for epsilon in (0.0, 0.2, 0.5, 0.7, 0.999):
        expected = sum(
            p * max(0.0, 1 - math.exp(epsilon - loss)) for p, loss in ((0.3, 0.5), (0.2, 1.0))
        )
        assert curve.delta(epsilon) == pytest.approx(expected + 0.01, rel=1e-14)
        assert curve.epsilon(expected + 0.01) == pytest.approx(epsilon, abs=1e-12)
    assert curve.delta(1.0) == curve.delta(50.0) == 0.01
    assert curve.epsilon(0.9) == 0.0
    assert curve.epsilon(0.01) == math.inf


def test_a_loss_that_starts_above_zero() -> None:
    curve = DeltaCurve.of(4, 0.5, np.array([0.5, 0.5]), 0.0)
    delta = 0.5 * (1 - math.exp(1 - 2.0)) + 0.5 * (1 - math.exp(1 - 2.5))
    assert curve.delta(1.0) == pytest.approx(delta, rel=1e-14)
    assert curve.epsilon(delta) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("size", "spacing"), [(1, 1e-4), (20_000, 1e-4), (20_000, 0.02), (50, 70.0), (9, 1000.0)]
)
def test_discounted_sums_are_exact_over_runs_of_any_length(size: int, spacing: float) -> None:
    """Against one term after the other in 40 digits, over masses of three hundred magnitudes."""
    generator = np.random.default_rng(size)
    pmf = np.exp(-generator.uniform(0, 700, size) * generator.random(size))
    found = DeltaCurve.of(0, spacing, pmf, 0.0).discounted
    with mp.workdps(40):
        share, total = mp.exp(-mp.mpf(spacing)), mp.mpf(0)
        for j in range(size - 1, -1, -1):
            total = total * share + mp.mpf(float(pmf[j]))
            if j % 97 == 0:
                assert abs(mp.mpf(float(found[j])) / total - 1) < 1e-13, j
