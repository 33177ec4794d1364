"""Shares of noise meet every need as theorem B with unequal noise says, and no share is too much.

The theorem is written down anew here: docs/explain/trust_models.md.
"""

import itertools
import math
from collections.abc import Sequence

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled
from fedsim.accountant.trust import NoiseNeed, NoiseShares, honest_clients

ROUNDED_UP = 1 + 2**-39

numbers = st.floats(min_value=1e-6, max_value=1e6)
needs = st.builds(NoiseNeed, numbers, numbers, st.one_of(st.just(0.0), numbers))
cases = st.integers(1, 30).flatmap(
    lambda m: st.tuples(st.lists(needs, min_size=1, max_size=8), st.just(m), st.integers(0, m - 1))
)


def multiplier(noises: Sequence[float], scale: float) -> float:
    """Theorem B: the honest noises of a sum, in what one unit of client k moves it by."""
    return math.sqrt(math.fsum(noise**2 for noise in noises)) / scale


def sum_multiplier(shares: NoiseShares, scale: float) -> float:
    """A client's noise multiplier against whoever sees sums of the fewest honest clients."""
    return math.sqrt(shares.honest) * shares.own_multiplier(scale)


@given(cases)
def test_every_need_is_met_and_one_exactly(case: tuple[list[NoiseNeed], int, int]) -> None:
    own, m, t = case
    shares = NoiseShares.meeting(own, min_clients=m, colluding_clients=t)
    assert shares.honest == m - t
    excess = []
    for need in own:
        sums = multiplier([shares.share] * (m - t), need.scale)
        server = multiplier([shares.share], need.scale)
        assert sums >= need.against_sums
        assert server >= need.against_server
        assert shares.own_multiplier(need.scale) == pytest.approx(server, rel=1e-12)
        excess.append(sums / need.against_sums)
        if need.against_server:
            excess.append(server / need.against_server)
    assert min(excess) <= ROUNDED_UP


@given(st.lists(needs, min_size=2, max_size=6), st.data())
def test_the_worst_sum_and_the_worst_colluders(own: list[NoiseNeed], data: st.DataObject) -> None:
    """Every set of at least m clients, with any t of the others dishonest, protects client k."""
    m = data.draw(st.integers(1, len(own)))
    t = data.draw(st.integers(0, m - 1))
    shares = NoiseShares.meeting(own, min_clients=m, colluding_clients=t)
    noises = [shares.share] * len(own)
    for k, need in enumerate(own):
        others = [j for j in range(len(own)) if j != k]
        worst = math.inf
        for size in range(m, len(own) + 1):
            for sum_of in itertools.combinations(others, size - 1):
                honest = sum_of[min(t, len(sum_of)) :]
                worst = min(
                    worst, multiplier([noises[k], *(noises[j] for j in honest)], need.scale)
                )
        assert worst >= need.against_sums
        assert worst == pytest.approx(sum_multiplier(shares, need.scale), rel=1e-12)


@given(st.lists(needs, min_size=1, max_size=8), st.integers(2, 30), st.data())
def test_shares_are_monotone(own: list[NoiseNeed], m: int, data: st.DataObject) -> None:
    """More survivors, fewer colluders and smaller needs never need more noise."""
    t = data.draw(st.integers(0, m - 2))

    def share(own: Sequence[NoiseNeed], m: int, t: int) -> float:
        return NoiseShares.meeting(own, min_clients=m, colluding_clients=t).share

    base = share(own, m, t)
    assert share(own, m + 1, t) <= base <= share(own, m, t + 1)
    assert share(own[1:], m, t) <= base
    assert share([NoiseNeed(n.scale, n.against_sums) for n in own], m, t) <= base


@given(numbers, numbers)
def test_one_client_is_local_trust(scale: float, needed: float) -> None:
    alone = NoiseShares.meeting([NoiseNeed(scale, needed)], min_clients=1, colluding_clients=0)
    assert alone.honest == 1
    assert sum_multiplier(alone, scale) == alone.own_multiplier(scale)
    assert needed <= alone.own_multiplier(scale) <= needed * ROUNDED_UP


@pytest.mark.parametrize(("m", "t"), [(1, 1), (0, 0), (3, 3), (2, 5), (4, -1)])
def test_without_an_honest_client_nothing_is_promised(m: int, t: int) -> None:
    with pytest.raises(ValueError, match="raise min_clients or lower colluding_clients"):
        honest_clients(min_clients=m, colluding_clients=t)
    with pytest.raises(ValueError, match=f"min_clients = {m} clients {t} may collude"):
        NoiseShares.meeting([NoiseNeed(1.0, 1.0)], min_clients=m, colluding_clients=t)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["scale", "against_sums", "against_server"])
def test_a_need_outside_its_range_is_refused(name: str, value: float) -> None:
    need = NoiseNeed(**{"scale": 1.0, "against_sums": 1.0, name: value})
    with pytest.raises(ValueError, match=name):
        NoiseShares.meeting([need], min_clients=3, colluding_clients=1)


def test_clients_that_send_nothing_need_nothing() -> None:
    nothing = NoiseShares.meeting([NoiseNeed(0.0, 5.0)], min_clients=3, colluding_clients=1)
    assert nothing.share == 0.0
    with pytest.raises(ValueError, match="scale"):
        nothing.own_multiplier(0.0)


@pytest.mark.parametrize("honest", [1, 4])
def test_both_events_with_dp_accounting(honest: int) -> None:
    """The worst allowed round, 60 times, against sums and against the server."""
    shares = NoiseShares.meeting([NoiseNeed(0.3, 3.0)], min_clients=honest + 1, colluding_clients=1)
    found = []
    for own in (sum_multiplier(shares, 0.3), shares.own_multiplier(0.3)):
        mine = PldAccountant().compose(PoissonSampled(0.2, Gaussian(own)), count=60)
        event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(own))
        other = PLDAccountant(value_discretization_interval=1e-3).compose(event, 60)
        assert mine.get_epsilon(1e-5) == pytest.approx(other.get_epsilon(1e-5), rel=2e-3)
        found.append(mine.get_epsilon(1e-5))
    assert (found[0] < found[1]) == (honest > 1)
