"""Exact tests of what a probe of the mechanism measured.

Noise is in charged standard deviations: under the claim, independent values of N(0, 1).
"""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from scipy.special import betainccinv, gammaincinv
from torch import Tensor

from fedsim.accountant.arrays import Floats

MAX_FALSE_ALARM_RATE = 1e-9  # of all tests of a probe together


@dataclass
class _Sum:
    squares: float = 0.0
    values: int = 0

    def add(self, other: "_Sum") -> None:
        self.squares += other.squares
        self.values += other.values

    @property
    def deviation(self) -> float:
        """Standard deviation, in charged ones."""
        return math.sqrt(self.squares / self.values)


@dataclass
class NoiseEvidence:
    """Measurements of a probe."""

    _noise: dict[tuple[int, Hashable], _Sum] = field(default_factory=dict)
    _charged: dict[tuple[int, Hashable], float] = field(default_factory=dict)
    _rows: dict[int, dict[int, list[Floats]]] = field(default_factory=dict)
    _excess: list[str] = field(default_factory=list)

    def add_contribution(self, client: int, contribution: float, *, limit: float) -> None:
        """Note the measured contribution of one example.

        Args:
            client: its client.
            contribution: norm in clipping bounds.
            limit: the largest norm that is not a mismatch.
        """
        if not contribution <= limit < math.inf:
            self._excess.append(
                f"client {client}: an example contributes {contribution:.4g} clipping bounds to a "
                "sum, and at most 1 is charged"
            )

    def add_silence(self, client: int, released: Tensor) -> None:
        """Note a release that must carry no noise: the server adds it.

        Args:
            client: its client.
            released: without examples (size,).
        """
        if bool(released.any()):
            self._excess.append(
                f"client {client}: the client adds noise of its own, and the server adds that of "
                "the sum"
            )

    def add_noise(
        self, client: int, kind: Hashable, squares: tuple[float, int], *, charged: float
    ) -> None:
        """Note noise values.

        Args:
            client: the client that drew them.
            kind: noise of one kind is also tested over all clients together.
            squares: sum of their squares, in charged standard deviations, and their number.
            charged: noise multiplier that the client is charged for.
        """
        self._noise.setdefault((client, kind), _Sum()).add(_Sum(*squares))
        self._charged[client, kind] = charged

    def add_row(self, client: int, round_number: int, values: Tensor) -> None:
        """Note the start of a release, to find repeated noise; two of each round are kept.

        Args:
            client: the client that drew it.
            round_number: its round.
            values: (n,), in charged standard deviations.
        """
        rows = self._rows.setdefault(client, {}).setdefault(round_number, [])
        if len(rows) < 2:
            rows.append(values.numpy())

    def mismatches(self) -> Iterator[str]:
        """Yield a message for each measurement that contradicts the charge.

        Guarantee: for a correct mechanism there is none, up to probability 1e-9.
        """
        pooled: dict[Hashable, _Sum] = {}
        for (_, kind), found in self._noise.items():
            pooled.setdefault(kind, _Sum()).add(found)
        pairs = list(self._pairs())
        tests = len(self._noise) + len(pooled) + len(pairs)
        share = MAX_FALSE_ALARM_RATE / max(1, tests)
        yield from self._excess
        for (client, kind), found in self._noise.items():
            if _is_too_small(found, share):
                charged = self._charged[client, kind]
                yield (
                    f"client {client}: the noise multiplier is {charged * found.deviation:.4g}, "
                    f"and {charged:.4g} is charged ({found.values:,} values)"
                )
        for found in pooled.values():
            if _is_too_small(found, share):
                yield (
                    f"the noise of all probed clients is {found.deviation:.4g} of what is charged "
                    f"({found.values:,} values)"
                )
        for one, other, what in pairs:
            if _is_correlated(one, other, share):
                yield f"{what}, and independent noise is charged"

    def _pairs(self) -> Iterator[tuple[Floats, Floats, str]]:
        """Yield pairs of releases that must be independent, with the message if they are not."""
        last: tuple[int, Floats] | None = None
        for client, rounds in self._rows.items():
            start, *steps = rounds[min(rounds)]
            others = [("round", row) for n in sorted(rounds)[1:] for row in rounds[n]]
            for what, row in [*(("step", row) for row in steps), *others]:
                yield start, row, f"client {client}: noise repeats from {what} to {what}"
            if last is not None:
                yield start, last[1], f"clients {last[0]} and {client} have noise in common"
            last = client, start


def _is_too_small(found: _Sum, miss: float) -> bool:
    """Whether a sum of squares of N(0, 1) is below its quantile: chi-square, exact.

    Args:
        found: the sum.
        miss: probability that a correct sum is found too small.
    """
    return found.values > 0 and found.squares < 2.0 * gammaincinv(found.values / 2.0, miss)


def _is_correlated(one: Floats, other: Floats, miss: float) -> bool:
    """Whether two independent Gaussian vectors would be so correlated; exact.

    Their squared correlation has the law Beta(1/2, (n − 1) / 2).

    Args:
        one: (n,).
        other: (n,); of another length, the common start is compared.
        miss: probability that independent vectors are found correlated.
    """
    n = min(one.size, other.size)
    one, other = one[:n], other[:n]
    scale = float(np.vdot(one, one)) * float(np.vdot(other, other))
    if n < 2 or scale == 0.0:
        return False
    squared = float(np.vdot(one, other)) ** 2 / scale
    return squared > float(betainccinv(0.5, (n - 1) / 2.0, miss))
