"""Correlated noise of a run: one row of integers per round, made from independent fresh noise.

The row of a round depends only on the fresh noise of this round and of earlier rounds. Fresh noise
is keyed by the round, so a process that continues a run computes the rows again. All operations are
single roundings of float64, so the bits are the same on every processor. A client's steps of DP-SGD
have rows too (`clients/correlated_noise.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedsim.noise.correlated.blt import BltStrategy
from fedsim.noise.correlated.strategies import (
    TREE_WEIGHTS,
    BandedStrategy,
    NoiseStrategy,
    TreeStrategy,
    new_nodes,
)
from fedsim.noise.sources import NoiseSource


class NoiseRows(ABC):
    """Generator of a run's correlated noise, which returns one row of integers per round.

    Guarantee: memory is `NoiseStrategy.buffers` rows and at most 20 more, for any number of rounds.

    Args:
        size: number of noise values of a round.
        device: device on which noise is drawn and kept; None for the CPU.

    Attributes:
        step: number of rows that were returned so far.
    """

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.size = size
        self.step = 0
        self._device = device

    def next_row(self, fresh: NoiseSource) -> Tensor:
        """Return the noise of the next round, whole numbers in float64 (size,).

        Args:
            fresh: source of the fresh noise of this round, used for nothing else.
        """
        row = self._next_row(fresh)
        self.step += 1
        return row

    @abstractmethod
    def _next_row(self, fresh: NoiseSource) -> Tensor:
        """Return the noise of the round with number `step`, from 0."""

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, self.size, dtype=torch.float64, device=self._device)

    def _draw(self, fresh: NoiseSource) -> Tensor:
        return fresh.fill_(self._zeros())


_STEPS_AHEAD = 16  # more would read the rows less often, and add up more of them one by one


class BandedRows(NoiseRows):
    """Correlated noise y_t = Z_t − rint(Σ_{j ≥ 1} c_j y_{t−j}) with few coefficients c_j.

    Z_t is the fresh noise of round t, and y_t is the row of the round. Products and sums are exact
    in any order, see docs/explain/proofs.md.

    Args:
        coefficients: c_0 = 1, c_1, ..., multiples of 2⁻¹⁶.
        size: number of noise values of a round.
        device: device on which noise is drawn and kept; None for the CPU.
    """

    def __init__(
        self, coefficients: Sequence[float], size: int, device: torch.device | None = None
    ) -> None:
        super().__init__(size, device)
        self._coefficients = tuple(coefficients)
        kept = len(coefficients) - 1
        self._past = self._zeros(kept)  # the row of step s is at s mod kept
        self._back = self._zeros(min(_STEPS_AHEAD, kept))

    @property
    def nbytes(self) -> int:
        """Size in bytes of the earlier rows that are kept, and of their sums."""
        return self._past.nbytes + self._back.nbytes

    def _next_row(self, fresh: NoiseSource) -> Tensor:
        row, kept = self._draw(fresh), len(self._past)
        if not kept:
            return row
        ahead = self.step % len(self._back)
        if ahead == 0:
            self._sum_kept_rows()
        back = self._back[ahead]
        for j in range(1, ahead + 1):
            back.add_(self._past[(self.step - j) % kept], alpha=self._coefficients[j])
        row.sub_(back.round_())
        self._past[self.step % kept] = row
        return row

    def _sum_kept_rows(self) -> None:
        """Compute Σ c_j y_{t−j} over the kept rows for the next steps t: one pass for all."""
        kept, ahead = len(self._past), len(self._back)
        padded = torch.tensor([*self._coefficients, *[0.0] * ahead], dtype=torch.float64)
        ages = (self.step - 1 - torch.arange(kept)) % kept + 1
        weights = padded[ages + torch.arange(ahead).unsqueeze(1)]
        torch.mm(weights.to(self._past.device), self._past, out=self._back)


class BltRows(NoiseRows):
    """Correlated noise y_t = Z_t − rint(Σ_i s_i S_i), by the buffers S_i of a `BltStrategy`.

    Z_t is the fresh noise of round t, and y_t is the row of the round. Each buffer then becomes
    λ_i S_i + y_t. The strategy has the scales s_i and the decays λ_i.
    """

    def __init__(self, strategy: BltStrategy, size: int) -> None:
        super().__init__(size)
        self._parameters = tuple(zip(strategy.scales, strategy.decays, strict=True))
        self._buffers = self._zeros(strategy.buffers)

    def _next_row(self, fresh: NoiseSource) -> Tensor:
        row, back = self._draw(fresh), self._zeros()
        # One operation after the other: a fused one would round differently on some processors.
        for (scale, _), buffer in zip(self._parameters, self._buffers, strict=True):
            back.add_(buffer * scale)
        row.sub_(back.round_())
        for (_, decay), buffer in zip(self._parameters, self._buffers, strict=True):
            buffer.mul_(decay).add_(row)
        return row


class TreeRows(NoiseRows):
    """Correlated noise of the binary tree over rounds.

    A row is the change, in one round, of the estimated noise in the sum of all rounds so far. A
    node with fresh noise Z has the estimate ⌊w Z + (1 − w) (left + right) + ½⌋, with weight w and
    the estimates left and right of the node's halves. If Z and left + right grow by the same
    integer, so does the estimate. So estimates are functions of noisy sums.
    """

    def __init__(self, strategy: TreeStrategy, size: int) -> None:
        super().__init__(size)
        self._finished: list[Tensor] = []  # estimates of the nodes of the rounds so far
        self._total = self._zeros()

    def _next_row(self, fresh: NoiseSource) -> Tensor:
        node = self._draw(fresh)
        for height in range(1, new_nodes(self.step)):
            weight = TREE_WEIGHTS[height]
            node.add_(self._finished.pop()).mul_(1.0 - weight)
            node.add_(self._draw(fresh).mul_(weight)).add_(0.5).floor_()
        self._finished.append(node)
        before, self._total = self._total, self._zeros()
        for node in self._finished:
            self._total.add_(node)
        return self._total - before


def noise_rows(strategy: NoiseStrategy, size: int) -> NoiseRows:
    """Return a new generator of a strategy's noise, which starts with the row of round 1.

    Args:
        strategy: the strategy of the run.
        size: number of noise values of a round.
    """
    match strategy:
        case BandedStrategy():
            return BandedRows(strategy.bands, size)
        case BltStrategy():
            return BltRows(strategy, size)
        case TreeStrategy():
            return TreeRows(strategy, size)
        case _:
            raise TypeError(f"no rows are known for {strategy!r}")


class NoiseOfRounds(NoiseSource):
    """Source of a run's correlated noise; each `fill_` draws the noise of one whole round.

    Args:
        strategy: the strategy of the run.
        fresh: function that returns the source of a round's fresh noise, by the round's number.
    """

    def __init__(self, strategy: NoiseStrategy, fresh: Callable[[int], NoiseSource]) -> None:
        self._strategy, self._fresh = strategy, fresh
        self._rows: NoiseRows | None = None
        self._round_number = 1

    def at(self, round_number: int) -> "NoiseOfRounds":
        """Set the round whose noise the next `fill_` draws, and return this source.

        Args:
            round_number: the round, from 1.
        """
        self._round_number = round_number
        return self

    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor with the noise of the round that `at` set; return the tensor.

        Earlier rounds that were not drawn yet, as after a restart, are computed first.

        Raises:
            TypeError: the tensor is not float64.
        """
        if values.dtype != torch.float64:
            raise TypeError(f"noise is whole numbers in float64, got a tensor of {values.dtype}")
        rows = self._rows
        if rows is None or rows.size != values.numel() or rows.step >= self._round_number:
            rows = noise_rows(self._strategy, values.numel())
        self._rows = None  # lost if an error cuts a row short
        while rows.step < self._round_number:
            values.copy_(rows.next_row(self._fresh(rows.step + 1)).view(values.shape))
        self._rows = rows
        return values
