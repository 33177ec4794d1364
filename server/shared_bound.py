"""The bound of whole updates that the server learns from noisy bits, the same for all clients."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedsim.protocol.noisy_sums import BoundRule, LearntBound, whole_bound


@dataclass(frozen=True)
class SharedBound:
    """What the server needs to learn S (Andrew et al. 2021, arXiv:1905.03871, Algorithm 1).

    Guarantee: S of a round is a function of releases of earlier rounds, which were charged.

    Attributes:
        first: S of the first round.
        rule: how S follows the share of updates within it.
        num_clients: all clients of the federation: each is told the same S.
        unit: length of a step of the grid of the bits, where they are a part of a noisy sum; None:
            replies carry them.
        divisor: a public number in place of the number of those who came; None: that number.
    """

    first: float
    rule: BoundRule
    num_clients: int
    unit: float | None = None
    divisor: float | None = None

    def of(self, clip_norms: Mapping[int, LearntBound]) -> float:
        """Return S of the round after a state with these bounds."""
        return whole_bound(clip_norms.get(0, self.first))

    def after_sum(self, bound: float, count: int | None, participants: int) -> dict[int, float]:
        """Return the bound of every client after a noisy sum.

        Args:
            bound: S of the round.
            count: Σ (b − ½) with noise, in steps of its grid; None: no sum was opened.
            participants: number of clients in the sum.
        """
        number = participants if self.divisor is None else self.divisor
        if count is None or self.unit is None or not number:
            return self._for_all(bound)
        return self._for_all(self.rule.next_bound(bound, count * self.unit / number + 0.5))

    def after_bits(self, bound: float, bits: Iterable[float]) -> dict[int, float]:
        """Return the bound of every client after noisy bits.

        Args:
            bound: S of the round.
            bits: b − ½ with noise, of each client in the aggregate.
        """
        found = list(bits)
        if not found:
            return self._for_all(bound)
        return self._for_all(self.rule.next_bound(bound, math.fsum(found) / len(found) + 0.5))

    def _for_all(self, bound: float) -> dict[int, float]:
        return dict.fromkeys(range(self.num_clients), bound)
