"""The aggregate view: the published numbers where theorem B holds, and silence elsewhere."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from fedsim.accountant.aggregate_view import (
    RoundView,
    UploadTerms,
    aggregate_view,
    failed_conditions,
)

TERMS = UploadTerms(
    local_steps=1,
    optimizer="sgd",
    sampling="poisson",
    clipping="flat",
    summed_securely=True,
    noise="secure",
    participation="fixed",
)


def view(honest: int, rounds: int = 500, **keys: Any) -> float | None:
    seen = RoundView(sensitivity=1.0, noise=(1.0,) * honest)
    settings = {"sampling_rate": 0.02, "delta": 1e-5, **keys}
    return aggregate_view(TERMS, [seen] * rounds, **settings).epsilon


@pytest.mark.parametrize(
    ("honest", "published"), [(1, 2.77), (2, 1.50), (5, 0.80), (10, 0.53), (50, 0.21)]
)
def test_published_values(honest: int, published: float) -> None:
    assert view(honest) == pytest.approx(published, abs=0.006)


@pytest.mark.parametrize("honest", [1, 5])
def test_dp_accounting_agrees(honest: int) -> None:
    event = dp_accounting.GaussianDpEvent(math.sqrt(honest))
    other = PLDAccountant().compose(dp_accounting.PoissonSampledDpEvent(0.02, event), 500)
    assert view(honest) == pytest.approx(other.get_epsilon(1e-5), rel=2e-3)


def test_weights_and_rounds_count_as_they_were() -> None:
    heavy = RoundView(sensitivity=2.0, noise=(2.0, 1.0, 1.0))
    assert heavy.noise_multiplier == pytest.approx(math.sqrt(6.0) / 2.0)
    alone = RoundView(sensitivity=1.0, noise=(1.0,))
    keys: dict[str, Any] = {"sampling_rate": 0.02, "delta": 1e-5}
    mixed = aggregate_view(TERMS, [heavy] * 5 + [alone] * 5, **keys).epsilon
    weakest = aggregate_view(TERMS, [alone] * 10, **keys).epsilon
    best = aggregate_view(TERMS, [heavy] * 10, **keys).epsilon
    assert best is not None
    assert mixed is not None
    assert weakest is not None
    assert best < mixed < weakest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"local_steps": 2}, "local_steps > 1"),
        ({"optimizer": "adam"}, "not linear in the noise"),
        ({"sampling": "shuffle"}, "not Poisson"),
        ({"clipping": "adaptive"}, "not flat"),
        ({"summed_securely": False}, "seen one by one"),
        ({"noise": "seeded"}, "knows the seed"),
        ({"participation": "by_value"}, "values decide who is summed"),
    ],
)
def test_no_number_without_every_condition(change: dict[str, Any], reason: str) -> None:
    terms = replace(TERMS, **change)
    answer = aggregate_view(
        terms, [RoundView(sensitivity=1.0, noise=(1.0,) * 10)], sampling_rate=0.1, delta=1e-5
    )
    assert not answer.is_claimed
    assert answer.epsilon is None
    assert reason in answer.reasons[0]
    assert answer.to_dict()["epsilon"] == "not_claimed"


@pytest.mark.parametrize(
    "seen", [{"noise": ()}, {"sensitivity": 0.0}, {"noise": (-1.0,)}, {"noise": (math.nan,)}]
)
def test_numbers_outside_their_range_are_refused(seen: dict[str, Any]) -> None:
    bad = replace(RoundView(sensitivity=1.0, noise=(1.0,)), **seen)
    with pytest.raises(ValueError, match="must"):
        aggregate_view(TERMS, [bad], sampling_rate=0.1, delta=1e-5)


def advantage(steps: int, clients: int = 100, trials: int = 200_000) -> float:
    """TPR - FPR of the best threshold on the sum, for the counterexample to amplification.

    The target example adds 1 to the first gradient. The same client's 400 other examples have loss
    |θ - τ| with τ where the first step decides its sign: their clipped gradients are ±400.
    """
    draw = np.random.default_rng(7)
    rate, others = 0.1, 400.0
    sums = []
    for present in (0.0, 1.0):
        first = present + draw.normal(size=trials)
        total = -rate * first
        if steps == 2:
            parameter = -rate * first
            side = np.where(parameter > -rate * 0.5, others, -others)
            total = total - rate * (side + draw.normal(size=trials))
        noise = math.sqrt((clients - 1) * steps) * rate
        sums.append(total + noise * draw.normal(size=trials))
    grid = np.quantile(np.concatenate(sums), np.linspace(0.0, 1.0, 2001))
    below = [np.searchsorted(np.sort(values), grid) / trials for values in sums]
    return float(np.abs(below[0] - below[1]).max())


def test_two_local_steps_break_the_square_root_law() -> None:
    """Why more than one step is refused: the sum alone gives away what sqrt(N) says it hides.

    Caps are the advantages of Gaussian mechanisms; three standard errors of 200,000 trials are
    below 0.005.
    """
    cap = {steps: 2 * norm.cdf(math.sqrt(steps / 100) / 2) - 1 for steps in (1, 2)}
    assert advantage(1) == pytest.approx(cap[1], abs=0.006)
    assert advantage(2) > 5 * cap[2]
    assert failed_conditions(replace(TERMS, local_steps=2)) != ()
