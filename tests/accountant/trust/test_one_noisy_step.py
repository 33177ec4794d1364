"""Why distributed trust takes one noisy step a round: docs/explain/trust_models.md."""

import math

import numpy as np
import pytest
from scipy.stats import norm


def advantage(steps: int, *, clients: int = 100, trials: int = 100_000) -> float:
    """TPR − FPR of the best threshold on the sum of all updates, for the page's counterexample.

    The unit adds 1 to the first gradient. The same client's 400 other examples have loss |θ − τ|
    with τ where the first step decides its sign: their clipped gradients add up to ±400.
    """
    draw, rate = np.random.default_rng(7), 0.1
    sums = []
    for present in (0.0, 1.0):
        first = -rate * (present + draw.normal(size=trials))
        total = first
        if steps == 2:
            side = np.where(first > -rate * 0.5, 400.0, -400.0)
            total = total - rate * (side + draw.normal(size=trials))
        hidden = math.sqrt((clients - 1) * steps) * rate
        sums.append(np.sort(total + hidden * draw.normal(size=trials)))
    grid = np.quantile(np.concatenate(sums), np.linspace(0.0, 1.0, 1001))
    below = [np.searchsorted(values, grid) / trials for values in sums]
    return float(np.abs(below[0] - below[1]).max())


def test_two_local_steps_break_the_square_root_law() -> None:
    """A rate of each of two samples is off by more than 0.009 with probability below 4e-7.

    That is 4 exp(-2 · 100,000 · 0.009²), by Dvoretzky, Kiefer, Wolfowitz and Massart.
    """
    cap = {steps: 2 * norm.cdf(math.sqrt(steps / 100) / 2) - 1 for steps in (1, 2)}
    assert advantage(1) == pytest.approx(cap[1], abs=0.018)
    assert advantage(2) == pytest.approx(2 * norm.cdf(0.5) - 1, abs=0.018)
    assert advantage(2) > 5 * cap[2]
