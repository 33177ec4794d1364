"""FedMedian: the median of the clients' models, value by value."""

from typing import ClassVar

from fedsim.algorithms.algorithm import NoOptions
from fedsim.algorithms.built_in.trimmed_mean import TrimmedMean
from fedsim.core.settings import Settings


class FedMedian(TrimmedMean):
    """Aggregation by the median: each value of the next model is the median over the clients.

    It is the trimmed mean that leaves out all but the middle value, or the two middle ones.

    Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", Algorithm 1, option I.
    """

    name: ClassVar[str] = "fedmedian"
    description: ClassVar[str] = "median of the models, value by value (Yin et al. 2018)"
    Options: ClassVar[type[Settings]] = NoOptions

    def left_out(self, n: int) -> int:
        """Return the number of values, of n, on each side of the middle."""
        return (n - 1) // 2
