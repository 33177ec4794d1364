"""What the sampler adds to ε and δ: the theorem's formula, and the theorem in exact arithmetic."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled, RdpAccountant
from fedsim.accountant.pld.privacy_profile import gaussian_epsilon
from fedsim.accountant.sampler_slack import (
    MAX_DRAWS,
    SHARE,
    Slack,
    delta_with_slack,
    epsilon_with_slack,
    sampler_slack,
)

Law = dict[int, int]  # in units of 2^-60


def proven_delta(epsilon: float, delta: float, shift: float, log_failure: float) -> float:
    """Return the δ of the theorem, or infinity where its t is larger than `shift`.

    It is written down anew here, with 50 digits.
    """
    with mpmath.workdps(50):
        failure, outside = mpmath.exp(log_failure), MAX_DRAWS * mpmath.mpf(2) ** -187
        mean_square, largest = mpmath.mpf("1e-23"), mpmath.mpf("5e-8")
        total = MAX_DRAWS * mean_square
        t = total + outside + mpmath.sqrt(2 * total * -log_failure)
        t += largest * -log_failure * 2 / 3
        if t > shift:
            return math.inf
        added = (1 + mpmath.exp(epsilon + t)) * (failure + outside)
        return float(mpmath.exp(t) * delta + added)


@pytest.mark.parametrize("delta", [0.5, 1e-5, 1e-15, 1e-30])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 8.0, 50.0, 78.0])
def test_the_theorem_gives_what_is_promised(epsilon: float, delta: float) -> None:
    """Some δ₁ must give the whole guarantee; δ₁ is sought on a grid."""
    slack = sampler_slack(epsilon, delta)
    ideal, shift = delta * (1 - SHARE), slack.epsilon / 2
    failures = [math.log(delta) - epsilon - step / 4 for step in range(4, 200)]
    best = min(proven_delta(epsilon, ideal, shift, one) for one in failures)
    if slack.epsilon == math.inf:
        assert epsilon - math.log(delta) > 88
    else:
        assert best <= delta
        assert 0 < slack.epsilon < 1.1e-4
        assert 0 < slack.delta <= SHARE * delta
        assert proven_delta(epsilon, ideal, shift * 0.8, failures[55]) == math.inf


def test_the_slack_grows_with_epsilon_and_shrinks_with_delta() -> None:
    """So the calibration of noise finds one place where a target is met."""
    epsilons = [0.0, 0.1, 1.0, 10.0, 50.0, 70.0, 90.0]
    deltas = [1e-30, 1e-15, 1e-9, 1e-5, 0.1]
    for delta in deltas:
        found = [sampler_slack(epsilon, delta).epsilon for epsilon in epsilons]
        assert found == sorted(found)
    for epsilon in epsilons:
        found = [sampler_slack(epsilon, delta).epsilon for delta in deltas]
        assert found == sorted(found, reverse=True)


def test_where_nothing_can_be_proven() -> None:
    assert sampler_slack(79.0, 1e-5).epsilon < math.inf
    assert sampler_slack(55.0, 1e-15).epsilon < math.inf
    nothing, none = Slack(math.inf, 1.0), sampler_slack(0.0, 1e-50)
    assert none == nothing
    for epsilon, delta in [(81.0, 1e-5), (57.0, 1e-15), (1000.0, 0.5), (8.0, 5e-324)]:
        assert sampler_slack(epsilon, delta) == nothing
        assert epsilon_with_slack(lambda _, epsilon=epsilon: epsilon, delta) == math.inf


def test_an_infinite_epsilon_has_no_slack() -> None:
    assert sampler_slack(math.inf, 1e-5) == Slack(0.0, 0.0)
    assert epsilon_with_slack(lambda _: math.inf, 1e-5) == math.inf


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_a_delta_outside_its_range_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        sampler_slack(1.0, delta)
    with pytest.raises(ValueError, match="delta"):
        epsilon_with_slack(lambda _: 1.0, delta)


@pytest.mark.parametrize("epsilon", [-1.0, math.nan])
def test_an_epsilon_outside_its_range_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        sampler_slack(epsilon, 1e-5)
    with pytest.raises(ValueError, match="epsilon"):
        delta_with_slack(lambda _: 0.1, epsilon)


@pytest.mark.parametrize("make", [PldAccountant, RdpAccountant])
def test_epsilon_of_an_accountant(make: Callable[[], PldAccountant | RdpAccountant]) -> None:
    accountant = make()
    assert epsilon_with_slack(accountant.get_epsilon, 1e-5) == 0.0
    assert delta_with_slack(accountant.get_delta, 0.0) == 0.0
    accountant.compose(PoissonSampled(0.01, Gaussian(1.0)), count=10_000)
    ideal = accountant.get_epsilon(1e-5)
    epsilon = epsilon_with_slack(accountant.get_epsilon, 1e-5)
    assert ideal + 4e-5 < epsilon < ideal + 1e-4
    # At this ε, δ is at most what it was for; the slack is counted twice on the way back.
    delta = delta_with_slack(accountant.get_delta, epsilon)
    assert accountant.get_delta(epsilon) < delta < 1.001e-5


def test_little_noise_at_a_large_delta_is_not_free() -> None:
    """ε is 0 at δ = 0.1 with the accountants' noise; nothing proves 0 with the sampler's."""
    accountant = PldAccountant().compose(PoissonSampled(1e-6, Gaussian(1.0)))
    assert accountant.get_epsilon(0.1) == 0.0
    assert epsilon_with_slack(accountant.get_epsilon, 0.1) == sampler_slack(0.0, 0.1).epsilon > 0
    assert accountant.get_delta(0.0) < delta_with_slack(accountant.get_delta, 0.0) < 1e-4


def test_delta_ends_at_one() -> None:
    for epsilon in (0.0, 8.0, 90.0, 800.0):
        assert delta_with_slack(lambda _: 1.0, epsilon) == 1.0
    assert delta_with_slack(lambda _: 1e-60, 90.0) < 1e-4 < delta_with_slack(lambda _: 1e-60, 99.9)


def test_the_profile_of_a_gaussian() -> None:
    """δ with slack against the definition: the smallest over many δ₁."""
    few = PldAccountant().compose(PoissonSampled(1e-6, Gaussian(1.0)))
    one = PldAccountant().compose(Gaussian(1.0))
    cases = [(one, epsilon) for epsilon in (0.0, 1e-5, 1.0, 4.0, 8.0)]
    for accountant, epsilon in [*cases, (few, 0.0), (few, 1e-5)]:
        found = delta_with_slack(accountant.get_delta, epsilon)
        shifts = [step * 1e-6 for step in range(15, 60, 4)]
        ideal = [max(epsilon - 2 * shift, 0.0) for shift in shifts]
        beyond_zero = [max(2 * shift - epsilon, 0.0) for shift in shifts]
        best = min(
            proven_delta(inner, accountant.get_delta(inner) + below, shift, log)
            for inner, below, shift in zip(ideal, beyond_zero, shifts, strict=True)
            for log in range(-60, -5, 2)
        )
        assert best < found * 1.001
        assert found < best * 1.001 + 1e-4 * accountant.get_delta(epsilon) + 4e-5
    assert gaussian_epsilon(1.0, 1e-5) < epsilon_with_slack(one.get_epsilon, 1e-5)


# The theorem in exact arithmetic: a sampler of four 2-bit uniforms and a centre, a law that stands
# for the rounded normal, and all outcomes of an adaptive mechanism.


def spline_law(bits: int, centres: Law) -> Law:
    """Return the law of 2^bits · c plus four uniforms minus their mean, exactly."""
    width = 1 << bits
    law: Law = {}
    for uniforms in itertools.product(range(width), repeat=4):
        for centre, weight in centres.items():
            value = width * centre + sum(uniforms) - 2 * (width - 1)
            law[value] = law.get(value, 0) + weight // width**4
    return law


def rounded_normal(deviation: float, limit: int) -> Law:
    """Return a rational law close to that of a rounded normal; the ends have what is beyond."""
    with mpmath.workdps(30):
        upper = [mpmath.ncdf((k + mpmath.mpf(1) / 2) / deviation) for k in range(-limit, limit)]
    cumulative = [0, *(int(one * 2**60) for one in upper), 2**60]
    return {k: cumulative[k + limit + 1] - cumulative[k + limit] for k in range(-limit, limit + 1)}


def small_laws() -> tuple[Law, Law]:
    """Return the sampler's law and the rounded normal's, of deviation 4 on a grid of 1."""
    variance = (16 + 1 / 12 - 5) / 16  # four uniforms on 0 ... 3 have 5
    weights = {c: round(2**51 * math.exp(-c * c / (2 * variance))) for c in range(-4, 5)}
    total = sum(weights.values())
    centres = {c: (one * 2**52 // total) * 2**8 for c, one in weights.items()}
    centres[0] += 2**60 - sum(centres.values())
    return spline_law(2, centres), rounded_normal(4.0, 30)


def outcomes(law: Law, moved: int) -> list[tuple[int, int]]:
    """Return the probabilities of two adaptive releases, on data of 0 and of `moved`.

    The second query depends on the first release: it is not asked where that is odd. Units: 2^-120.
    """
    places = range(min(law) - 30, max(law) + moved + 31)
    return [
        (
            law.get(first, 0) * law.get(second, 0),
            law.get(first - moved, 0) * law.get(second - (moved if first % 2 == 0 else 0), 0),
        )
        for first, second in itertools.product(places, repeat=2)
    ]


def hockey_stick(pairs: list[tuple[int, int]], factor: Fraction, turn: int) -> Fraction:
    n, d = factor.as_integer_ratio()
    total = sum(max(d * p - n * q, 0) for p, q in (pair[::turn] for pair in pairs))
    return Fraction(total, d << 120)


def beyond(first: Law, second: Law, factor: Fraction) -> Fraction:
    """Return the probability under first² that first² / second² of two draws exceeds `factor`."""
    n, d = factor.as_integer_ratio()
    chance = 0
    for (a, p), (b, q) in itertools.product(first.items(), repeat=2):
        if d * p * q > n * second.get(a, 0) * second.get(b, 0):
            chance += p * q
    return Fraction(chance, 1 << 120)


@pytest.mark.parametrize("moved", [1, 4])
def test_two_changes_of_measure_in_exact_arithmetic(moved: int) -> None:
    drawn, ideal = small_laws()
    assert sum(drawn.values()) == sum(ideal.values()) == 2**60
    of_drawn, of_ideal = outcomes(drawn, moved), outcomes(ideal, moved)
    without_slack = 0
    for shift in (Fraction(105, 100), Fraction(12, 10), Fraction(15, 10)):  # e^t
        failure = max(beyond(drawn, ideal, shift), beyond(ideal, drawn, shift))  # δ₁
        assert failure < Fraction(2, 100)
        for factor, turn in itertools.product((Fraction(1), Fraction(3), Fraction(8)), (1, -1)):
            delta = hockey_stick(of_ideal, factor, turn)  # factor: e^ε
            bound = shift * delta + (1 + factor * shift) * failure
            assert hockey_stick(of_drawn, factor * shift**2, turn) <= bound
            without_slack += hockey_stick(of_drawn, factor, turn) > delta
    assert without_slack  # the laws differ enough that something must be added


def test_bernsteins_bound_against_every_outcome() -> None:
    """t from mean square and maximum bounds the probability that the sum of ℓ exceeds it."""
    drawn, ideal = ({k: one / 2**60 for k, one in law.items()} for law in small_laws())
    inside = [k for k in ideal if abs(k) <= 12]
    outside = max(1 - sum(law[k] for k in inside) for law in (drawn, ideal))
    for law, other in ((drawn, ideal), (ideal, drawn)):
        logs = {k: math.log(law[k] / other[k]) for k in inside}
        largest = max(abs(log) for log in logs.values())
        square = max(sum(one[k] * log**2 for k, log in logs.items()) for one in (law, other))
        for draws, failure in itertools.product((1, 2, 3), (0.3, 0.1, 0.01)):
            log = -math.log(failure)
            t = draws * (square * math.exp(largest) + outside)
            t += math.sqrt(2 * draws * square * log) + 2 / 3 * largest * log
            chance = sum(
                math.prod(law[k] for k in values)
                for values in itertools.product(inside, repeat=draws)
                if sum(logs[k] for k in values) > t
            )
            assert chance <= failure
