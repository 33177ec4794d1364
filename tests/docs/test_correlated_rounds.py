"""Every number of the pages on correlated noise of rounds is computed here."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.signal import lfilter

from fedsim.clients.mechanisms.plan import Accounting
from fedsim.noise.correlated.blt import optimised_blt
from fedsim.noise.correlated.settings import MinSeparation
from fedsim.noise.correlated.strategies import TreeStrategy
from fedsim.planning.alternatives import compare_correlations

PAGE = Path(__file__).parent.parent.parent / "docs" / "howto" / "correlated_rounds.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")
FEW = {"rounds": 2000, "clients": 1000, "clients_per_round": 10, "accounting": Accounting(1e-4)}
MANY = {"rounds": 2000, "clients": 10_000, "clients_per_round": 20, "accounting": Accounting(1e-5)}


def test_the_table_has_the_errors_at_the_same_epsilon() -> None:
    text = PAGE.read_text(encoding="utf-8")
    columns = [compare_correlations(**case, target_epsilon=8.0) for case in (FEW, MANY)]
    for few, many in zip(*columns, strict=True):
        if few.noise == "blt, 2 buffers":  # the page has four
            continue
        noise = few.noise.partition(",")[0].replace("none", "independent")
        assert f"| {noise} | {few.scheme} | {few.error:.2f} | {many.error:.2f} |" in text
    poisson, *_, best = compare_correlations(**FEW, target_epsilon=2.0)
    assert f"is {poisson.error / best.error:.2f} of that of `blt`" in " ".join(text.split())


def test_what_parameters_for_momentum_gain() -> None:
    less = []
    for rounds, apart in product((1024, 2000), (100, 400)):
        participation, noise = MinSeparation.of(rounds, apart), dict[float, float]()
        for momentum in (0.0, 0.9):
            strategy = optimised_blt(3, participation, momentum)
            models = np.asarray(lfilter([1.0], [1.0, -0.9], np.cumsum(strategy.inverse(rounds))))
            rms = float(np.sqrt(np.cumsum(models**2).mean()))
            noise[momentum] = rms * strategy.sensitivity(participation)
        less.append(round(100 * (1 - noise[0.9] / noise[0.0])))
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"the models then have {min(less)} to {max(less)} % less noise" in text


@pytest.mark.parametrize("apart", [100, 200, 400])
def test_constants_of_the_proofs(apart: int) -> None:
    participation = MinSeparation.of(2000, apart)
    assert optimised_blt(4, participation).buffer_error(2000) < 0.005
    most = 0.0
    for first in range(apart):
        rounds = np.arange(first, 2000, apart)
        squares = 0.0
        for length in (1 << height for height in range((2000).bit_length())):
            nodes = rounds // length
            squares += (np.bincount(nodes[(nodes + 1) * length <= 2000]) ** 2).sum()
        most = max(most, float(np.sqrt(squares)))
    assert most <= TreeStrategy(2000).sensitivity(participation) <= 1.05 * most
