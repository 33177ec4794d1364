"""Distributed noise has the law of central DP-SGD on pooled data: two-sample tests on models."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from experiments.reproductions.rows import Row, context_row, law_row
from experiments.reproductions.runs import VariantRuns, run_variants
from experiments.reproductions.study import Setup, Study

FALSE_ALARM = 1e-3  # of all tests of a size together
PERMUTATIONS = 20_000
OTHER_SEEDS = 1000  # between the seeds of the two samples
CONTROL = "less-noise"

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Test:
    """A statistic of two samples, as the quadratic form or the sum of signs of the samples.

    Attributes:
        name: the statistic.
        values: (runs, runs) for a quadratic form, (runs,) for a sum, of both samples in order.
    """

    name: str
    values: Floats

    def p_value(self) -> float:
        """Return the p value of a permutation test of exchangeable samples of one size.

        Guarantee: where both samples have one law, it is at most p with probability at most p.
        """
        total = len(self.values)
        signs = np.repeat([1.0, -1.0], total // 2)
        rng = np.random.default_rng(0)
        drawn = np.stack([signs, *(rng.permutation(signs) for _ in range(PERMUTATIONS))])
        if self.values.ndim == 2:  # the energy distance, up to a factor
            found = -np.einsum("ps,st,pt->p", drawn, self.values, drawn, optimize=True)
        else:
            found = np.abs(drawn @ self.values)
        slack = 1e-12 * np.abs(self.values).sum()
        return float(np.count_nonzero(found >= found[0] - slack)) / len(found)


def tests_of(one: VariantRuns, other: VariantRuns) -> list[Test]:
    """Return the tests of two variants: models as points, their spread, and accuracy."""
    models = np.concatenate([one.models(), other.models()])
    accuracy = one.metric("test_accuracy") + other.metric("test_accuracy")
    return [
        Test(
            name="final models, energy distance",
            values=np.asarray(cdist(models, models), dtype=np.float64),
        ),
        Test(name="spread of final models", values=((models - models.mean(0)) ** 2).sum(1)),
        Test(name="test accuracy, mean", values=np.array(accuracy)),
    ]


def measure(setup: Setup) -> list[Row]:
    """Return the tests of both trust models against pooled data, and those of the control."""
    runs = run_variants("pooled_compare.yaml", setup, variants=("distributed", "central", CONTROL))
    # Seeds of their own: with the same seed runs share batches and noise, and the samples would
    # pair.
    others = [seed + OTHER_SEEDS for seed in setup.seeds]
    alone = replace(setup, seeds=others, out=setup.out / "pooled")
    pooled = run_variants("pooled_compare.yaml", alone, variants=("pooled", CONTROL))["pooled"]
    tests = [
        (trust, test)
        for trust in ("distributed", "central")
        for test in tests_of(runs[trust], pooled)
    ]
    rows = [
        law_row(
            f"{trust} against pooled: {test.name}",
            "one distribution",
            test.p_value(),
            false_alarm=FALSE_ALARM / len(tests),
        )
        for trust, test in tests
    ]
    for test in tests_of(runs[CONTROL], pooled):
        what = f"control, 10 % less noise against pooled: {test.name}"
        rows.append(context_row(what, f"p = {test.p_value():.3g}"))
    return rows


SETTINGS = (
    "Claims: the server's noise on a sum is that of DP-SGD on the pooled data (McMahan et al. "
    "2018), and shares of discrete Gaussian noise add up to nearly one draw (Kairouz et al. "
    "2021). Ten clients of the digits with sampling rate 0.2, all of them in each sum (m = n) "
    "and none colluding (t = 0), a trusted server, and one client with all data, 20 rounds of "
    "one step each. Split and initial model are the same in all runs; batches and noise are "
    "independent. Permutation tests of the final models and of their accuracy reject a true "
    "claim, in any of the six tests, with probability at most 0.001. The control shows that the "
    "tests see a noise that is 10 % too small."
)

STUDIES = {
    "pooled_dp_sgd": Study(
        title="Noise in shares is central DP-SGD on pooled data",
        source="McMahan et al. 2018, arXiv:1710.06963; Kairouz et al. 2021, arXiv:2102.06387",
        settings=SETTINGS,
        measure=measure,
        seeds={"reduced": 10, "full": 30},
    ),
}
