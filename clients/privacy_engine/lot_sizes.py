"""Test of whether lots can be Poisson samples, by their sizes alone.

Lots from outside are charged as Poisson samples. For an ordinary loader, shuffled and cut into
equal batches, that ε would not hold.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammaln, xlog1py, xlogy

from fedsim.core.errors import FedsimError

FALSE_ALARM_PROBABILITY = 1e-9

_FIX = (
    "The loader cuts or shuffles the data into batches, or has another batch size than declared, "
    "so the epsilon would be too small. Take lots from engine.batches(x, y) or from the loader of "
    "PrivacyEngine.make_private(...); or construct the engine with sampling='shuffle', which "
    "accounts for shuffled batches without amplification"
)


class NotPoissonError(FedsimError, RuntimeError):
    """Lots that are charged as Poisson samples are not."""


class LotSizes:
    """Sizes of the lots so far, tested against Binomial(sample_size, rate).

    Two statistics: the count of the most frequent size, and the total number of examples. Under
    Poisson sampling size s has the probability p_s. Some size then occurs at least m times in k
    lots with probability at most Σ_s P(Binomial(k, p_s) ≥ m), and the k lots together have
    Binomial(k · sample_size, rate) examples.

    Guarantee: over a training of any length, Poisson samples are refused with a probability of at
    most 1e-9: each test of lot k may fail with ½ · 1e-9 / (k (k + 1)), and these sum to 1e-9. The
    converse does not hold: sizes cannot prove that lots are Poisson samples.
    """

    def __init__(self, sample_size: int, rate: float) -> None:
        self._population, self._rate = sample_size, rate
        self._probabilities = size_probabilities(sample_size, rate)
        self._counts: Counter[int] = Counter()

    @property
    def counts(self) -> dict[int, int]:
        """Number of lots of each size."""
        return dict(self._counts)

    def restore(self, counts: dict[int, int]) -> None:
        """Resume from `counts`."""
        self._counts = Counter({int(size): int(count) for size, count in counts.items()})

    def add_size(self, size: int) -> None:
        """Add the size of one more lot, and test.

        Raises:
            NotPoissonError: lots like these come from Poisson sampling once in 1e9 trainings.
        """
        self._counts[size] += 1
        lots = self._counts.total()
        if lots > 64 and lots & (lots - 1):  # later tests are rare: each sums over all sizes
            return
        limit = 0.5 * FALSE_ALARM_PROBABILITY / (lots * (lots + 1))
        self._refuse_repeats(lots, limit)
        self._refuse_excess(lots, limit)

    def _refuse_repeats(self, lots: int, limit: float) -> None:
        often, times = self._counts.most_common(1)[0]
        chance = chance_of_repeats(self._probabilities, lots, times)
        if chance < limit:
            raise NotPoissonError(
                f"{times} of {lots} lots had {often} examples each; Poisson sampling, which the "
                f"account claims, gives lots so alike with probability {chance:.1g}. {_FIX}"
            )

    def _refuse_excess(self, lots: int, limit: float) -> None:
        seen = sum(size * count for size, count in self._counts.items())
        possible = lots * self._population
        if seen <= possible * self._rate:
            return
        chance = 0.0
        if seen <= possible:
            chance = float(betainc(float(seen), float(possible - seen + 1), self._rate))
        if chance < limit:
            raise NotPoissonError(
                f"{lots} lots had {seen} examples; the account claims Poisson samples of "
                f"{possible * self._rate / lots:g} on average, which give so many with probability "
                f"{chance:.1g}. Declare the batch_size and sample_size that the loader has. {_FIX}"
            )


def size_probabilities(sample_size: int, rate: float) -> NDArray[np.float64]:
    """Return the probabilities of the sizes of a Poisson sample, without negligible ones.

    Omitted are sizes further than 12 standard deviations and 40 examples from the mean; their
    repetition is no likelier than that of any size within.

    Args:
        sample_size: number of examples.
        rate: sampling rate in (0, 1].
    """
    if rate >= 1.0:
        return np.ones(1)
    mean = sample_size * rate
    reach = 12.0 * np.sqrt(mean * (1.0 - rate)) + 40.0
    low, high = max(0, int(mean - reach)), min(sample_size, int(mean + reach))
    sizes = np.arange(low, high + 1, dtype=np.float64)
    logarithms = (
        gammaln(sample_size + 1.0)
        - gammaln(sizes + 1.0)
        - gammaln(sample_size - sizes + 1.0)
        + xlogy(sizes, rate)
        + xlog1py(sample_size - sizes, -rate)
    )
    return np.exp(np.minimum(logarithms, 0.0))


def chance_of_repeats(probabilities: NDArray[np.float64], lots: int, times: int) -> float:
    """Return a bound on the probability that some size occurs at least `times` times.

    Args:
        probabilities: of the sizes of one lot.
        lots: number of lots.
        times: number of equal sizes.
    """
    tails = betainc(float(times), float(lots - times + 1), probabilities)
    return float(min(1.0, tails.sum()))
