"""Charges and checks of batches from the training script's own loader.

The engine sees the size of such a batch, but not how it was drawn. Amplification by sampling holds
only for random batches, so it is claimed only if the caller declares Poisson samples. For an
ordinary loader, which shuffles and cuts equal batches, the amplified ε would be wrong. So batch
sizes that Poisson samples cannot have are refused.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammaln, xlog1py, xlogy

from fedsim.accountant import Event
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.privacy_engine.terms import PrivacyTerms
from fedsim.core.errors import FedsimError

FALSE_ALARM_PROBABILITY = 1e-9

_FIX = (
    "The loader cuts or shuffles the data into batches, or has another batch size than declared, "
    "so the epsilon would be too small. Take batches from engine.batches(x, y) or from the loader "
    "of PrivacyEngine.make_private(...); or construct the engine with sampling='shuffle', which "
    "accounts for shuffled batches without amplification"
)


class NotPoissonError(FedsimError, RuntimeError):
    """Error if batches were declared Poisson samples, but their sizes contradict this."""


class BatchSizes:
    """Statistical test of whether the sizes of all batches so far can be Poisson samples.

    There are two test statistics: the count of the most frequent size, and the total number of
    examples. Let p_s be the probability that a Poisson sample has size s. In k batches, some size
    occurs at least m times with probability at most Σ_s P(Binomial(k, p_s) ≥ m). The k batches
    together have Binomial(k · sample_size, rate) examples.

    Guarantee: in a training of any length, true Poisson samples are refused with probability at
    most 1e-9. Each of the two tests after batch k fails with probability at most ½ · 1e-9 / (k (k +
    1)), and the sum is at most 1e-9. Sizes cannot prove that batches are Poisson samples.

    Attributes:
        counts: number of batches so far of each size.

    Args:
        sample_size: public number of examples.
        rate: declared sampling rate, in (0, 1].
    """

    def __init__(self, sample_size: int, rate: float) -> None:
        self._population, self._rate = sample_size, rate
        self._probabilities = size_probabilities(sample_size, rate)
        self.counts: Counter[int] = Counter()

    def add_size(self, size: int) -> None:
        """Add the size of one more batch, and test all sizes so far.

        Raises:
            NotPoissonError: Poisson sampling gives such sizes in less than one of 1e9 trainings.
        """
        self.counts[size] += 1
        batches = self.counts.total()
        # Later tests are rare, at powers of two: each sums over all sizes.
        if batches <= 64 or not batches & (batches - 1):
            self.check()

    def check(self) -> None:
        """Test all sizes so far.

        Raises:
            NotPoissonError: Poisson sampling gives such sizes in less than one of 1e9 trainings.
        """
        batches = self.counts.total()
        if not batches:
            return
        limit = 0.5 * FALSE_ALARM_PROBABILITY / (batches * (batches + 1))
        self._refuse_repeats(batches, limit)
        self._refuse_excess(batches, limit)

    def _refuse_repeats(self, batches: int, limit: float) -> None:
        often, times = self.counts.most_common(1)[0]
        chance = chance_of_repeats(self._probabilities, batches, times)
        if chance < limit:
            raise NotPoissonError(
                f"{times} of {batches} batches had {often} examples each; Poisson sampling, as "
                f"declared, gives batches so alike with probability {chance:.1g}. {_FIX}"
            )

    def _refuse_excess(self, batches: int, limit: float) -> None:
        seen = sum(size * count for size, count in self.counts.items())
        possible = batches * self._population
        if seen <= possible * self._rate:
            return
        chance = 0.0
        if seen <= possible:
            chance = float(betainc(float(seen), float(possible - seen + 1), self._rate))
        if chance < limit:
            raise NotPoissonError(
                f"{batches} batches had {seen} examples; Poisson samples as declared, of "
                f"{possible * self._rate / batches:g} on average, give so many with probability "
                f"{chance:.1g}. Declare the batch_size and sample_size that the loader has. {_FIX}"
            )


def size_probabilities(sample_size: int, rate: float) -> NDArray[np.float64]:
    """Return the probabilities of the possible sizes of a Poisson sample, in ascending order.

    Sizes further than 12 standard deviations plus 40 examples from the mean are left out, because
    they are so improbable.

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


def chance_of_repeats(probabilities: NDArray[np.float64], batches: int, times: int) -> float:
    """Return an upper bound on the probability that some size occurs at least `times` times.

    Args:
        probabilities: probability of each batch size, (sizes,).
        batches: number of batches.
        times: number of batches of the same size.
    """
    tails = betainc(float(times), float(batches - times + 1), probabilities)
    return float(min(1.0, tails.sum()))


logger = logging.getLogger(__name__)

_WAYS = (
    "take batches from engine.batches(x, y), engine.private_loader(loader) or "
    "PrivacyEngine.make_private(...), or pass batches='poisson' if your loader draws each example "
    "independently with probability batch_size / sample_size"
)


class OutsideBatchError(FedsimError, RuntimeError):
    """Error for a batch that the engine did not draw and that has no privacy guarantee."""


class OutsideBatches:
    """Record of batches that the engine did not draw, with checks and privacy events.

    Guarantee: a batch is charged as a release on a known batch, without amplification by sampling,
    unless the caller declared it a Poisson sample.

    Args:
        terms: the engine's public terms.

    Attributes:
        are_amplified: whether all batches so far were declared Poisson samples.
    """

    def __init__(self, terms: PrivacyTerms) -> None:
        self._terms = terms
        self._sizes = BatchSizes(terms.sample_size, terms.batch_size / terms.sample_size)
        self._failure: NotPoissonError | None = None
        self.are_amplified = True

    def check_claim(self) -> None:
        """Check that no batch so far contradicts the declared Poisson sampling.

        Raises:
            NotPoissonError: the batches cannot have been Poisson samples.
        """
        if self._failure is not None:
            raise self._failure

    def check_size(self, examples: int) -> None:
        """Check that a batch has at most as many examples as the declared batch or sample size.

        Args:
            examples: number of examples in the batch.

        Raises:
            OutsideBatchError: there are more examples. So an example occurs twice, or the rows are
                not examples.
        """
        name = "sample_size" if self._terms.batches == "poisson" else "batch_size"
        most: int = getattr(self._terms, name)
        if examples > most:
            raise OutsideBatchError(
                f"a batch of {examples} examples came through loss.backward(), of {name}={most}: "
                "rows are not examples, or an example occurs twice, but each is charged for one "
                "clipped gradient. For K views of each example make the engine with "
                f"augmentation_multiplicity=K; otherwise declare the {name} that the loader has"
            )

    def event(self, examples: int, mechanism: DpSgdMechanism) -> Event:
        """Return the privacy event of a step on a batch, and record the batch size.

        Args:
            examples: number of examples in the batch.
            mechanism: the DP-SGD mechanism of the step.

        Raises:
            OutsideBatchError: the batch has too many examples, or no privacy guarantee.
            NotPoissonError: batches were declared Poisson samples, but their sizes contradict this.
        """
        self.check_size(examples)
        if self._terms.batches == "poisson":
            try:
                self._sizes.add_size(examples)
            except NotPoissonError as error:
                self._failure = error
                raise
            return mechanism.event
        self._refuse_unaccounted()
        if self.are_amplified:
            logger.warning(
                "a batch that the engine did not draw is charged without amplification by "
                "sampling, and so is every further one; for a smaller epsilon %s",
                _WAYS,
            )
        self.are_amplified = False
        return mechanism.mechanism

    def state(self) -> dict[str, Any]:
        """Return the counts of batch sizes, and `are_amplified`, for a resumed engine."""
        return {"sizes": dict(self._sizes.counts), "are_amplified": self.are_amplified}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the values that `state` returned, and test the sizes of its batches again."""
        sizes = {int(size): int(count) for size, count in state["sizes"].items()}
        self._sizes.counts = Counter(sizes)
        self.are_amplified = bool(state["are_amplified"])
        try:
            self._sizes.check()
        except NotPoissonError as error:
            self._failure = error

    def _refuse_unaccounted(self) -> None:
        terms = self._terms
        if terms.target_epsilon is not None:
            raise OutsideBatchError(
                f"the noise was calibrated to target_epsilon={terms.target_epsilon:g} for Poisson "
                f"samples, and the engine did not draw this batch; {_WAYS}"
            )
        if terms.adjacency == "add_remove":
            raise OutsideBatchError(
                "adjacency='add_remove' has no guarantee for batches that the engine did not draw: "
                f"one more example may move others to another batch; {_WAYS}"
            )
