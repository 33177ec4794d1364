"""Every number of trust_models.md, and of sums in proofs.md, is computed here."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from scipy.stats import norm

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled, calibrate_noise_multiplier
from fedsim.accountant.sampler_slack import (
    _MAX_LOG_RATIO,
    _MEAN_SQUARE,
    _OUTSIDE,
    MAX_DRAWS,
    SHARE,
    epsilon_with_slack,
    target_without_slack,
)
from fedsim.accountant.trust import NoiseNeed, NoiseShares

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "explain" / "trust_models.md"
PROOFS = ROOT / "docs" / "explain" / "proofs.md"
RowsOf = Callable[[Path, str], list[list[str]]]
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")
ROUNDS, DELTA = 20, 1e-3


def text() -> str:
    return " ".join(" ".join(page.read_text(encoding="utf-8") for page in (PAGE, PROOFS)).split())


def epsilon(multiplier: float) -> float:
    """Return ε of 20 rounds with all examples in every batch."""
    accountant = PldAccountant().compose(Gaussian(multiplier), count=ROUNDS)
    return epsilon_with_slack(accountant.get_epsilon, DELTA)


def rounded_up(value: float) -> str:
    return f"{math.ceil(value * 1000) / 1000:.3f}"


def test_the_two_certificates_of_the_digits(rows_of: RowsOf) -> None:
    assert "20 rounds, all examples in every batch, δ = 0.001, and ε = 1 against `sums`" in text()
    target, delta = target_without_slack(1.0, DELTA)
    needed = calibrate_noise_multiplier(
        target_epsilon=target, delta=delta, sampling_rate=1.0, steps=ROUNDS, accountant="pld"
    )
    rows = rows_of(PAGE, "m")[1:]
    assert len(rows) == 7
    for m, t, *cells in rows:
        shares = NoiseShares.meeting(
            [NoiseNeed(0.3, needed)], min_clients=int(m), colluding_clients=int(t)
        )
        own = shares.own_multiplier(0.3)
        assert cells == [
            str(shares.honest),
            f"{own:.3f}",
            rounded_up(epsilon(math.sqrt(shares.honest) * own)),
            rounded_up(epsilon(own)),
        ]


def test_two_noisy_steps_break_the_theorem() -> None:
    """The sign of the second sum is read without error: 400 is 28 deviations of all noise."""
    advantage = 2 * norm.cdf(0.5) - 1
    cap = 2 * norm.cdf(math.sqrt(2 / 100) / 2) - 1
    assert f"advantage of {advantage:.4f}. " in text()
    assert f"no test could have more than {cap:.4f}. " in text()
    assert norm.sf(400 / math.sqrt(2 * 100)) < 1e-170


def test_drawing_clients_does_not_amplify_examples() -> None:
    p = q = 0.1
    z, at = 0.7, 0.5
    drawn = PldAccountant().compose(PoissonSampled(q, Gaussian(z))).get_delta(at)
    claimed = PldAccountant().compose(PoissonSampled(p * q, Gaussian(z))).get_delta(at)
    assert "p = q = 0.1 and z = 0.7" in text()
    assert f"makes δ = {p * drawn:.1e} at ε = {at}".replace("e-0", "e-") in text()
    assert f"would claim {claimed:.1e}. ".replace("e-0", "e-") in text()


def test_the_law_of_a_sum_of_draws(rows_of: RowsOf) -> None:
    rows = rows_of(PROOFS, "honest h")[1:]
    assert len(rows) == 4
    for honest, square, largest in rows:
        h = int(honest)
        assert square == f"{24 * (2.0**-32 / (720 * h)) ** 2:.1e}"
        found = 2.0**-32 * (16.25**4 - 6 * 16.25**2 + 3) / (720 * h)
        assert found < float(largest) < found * 1.1
        assert float(square) < _MEAN_SQUARE
        assert float(largest) < _MAX_LOG_RATIO


def test_the_constants_are_those_of_the_code() -> None:
    assert "`sampler_slack` assumes 1e-23 and 5e-8" in text()
    assert (_MEAN_SQUARE, _MAX_LOG_RATIO, _OUTSIDE) == (1e-23, 5e-8, 2.0**-187)
    assert "at most 10¹² values in all opened sums of a client" in text()
    assert "are (ε, δ (1 − 2⁻¹⁴))-DP" in text()
    assert (MAX_DRAWS, SHARE) == (10**12, 2**-14)
