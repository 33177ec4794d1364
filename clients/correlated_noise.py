"""Correlated noise of DP-FTRL: the banded Toeplitz matrix mechanism for prefix sums.

With fresh noise Z_t, step t adds y_t = Z_t − rint(Σ_{j ≥ 1} c_j y_{t−j}) to its gradient. So later
steps subtract a part of each step's noise, and sums over many steps are less noisy. This is the
matrix mechanism C y = Z, with C lower-triangular, Toeplitz, and zero below its first bands (McMahan
et al. 2024, arXiv:2405.15913; Choquette-Choo et al. 2023, arXiv:2306.08153). Theorem and proof:
docs/howto/correlated_noise.md.

The noise of step t depends only on the fresh noise of steps 0 to t. Fresh noise can be drawn again
for any step, so a missing state is recomputed: after a restart, in another process, in a repeated
round. The process caches the state, and never writes it to disk or sends it. All operations are
exact in float64, so the bits are the same on every processor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from fedsim.core.limits import MAX_NOISE_BANDS
from fedsim.noise.correlated.rows import BandedRows
from fedsim.noise.correlated.strategies import (
    COEFFICIENT_BITS,
    inverse_coefficients,
    square_root_coefficients,
)
from fedsim.noise.sources import NoiseSource


@dataclass(frozen=True)
class NoiseCorrelation:
    """Coefficients of a client's correlated noise, with the planned number of steps.

    Guarantee: suppose that an example can be in at most one of any `bands` successive batches. Then
    the run costs this example one release for each batch that may contain it. Each has noise
    multiplier z / ‖c‖, where z is the noise multiplier of the fresh noise and c are the
    coefficients (docs/howto/correlated_noise.md).

    Attributes:
        coefficients: c_0 = 1, c_1, ..., one for each band, each a multiple of 2⁻¹⁶.
        planned_steps: number of steps of the whole run, all charged before the first step.
        rounds_apart: least distance between two rounds of a client; always 1, so any rounds fit.

    Raises:
        ValueError: a coefficient is not a multiple of 2⁻¹⁶, the first is not 1, or there are too
            many.
    """

    coefficients: tuple[float, ...]
    planned_steps: int
    rounds_apart: ClassVar[int] = 1

    def __post_init__(self) -> None:
        whole = [(c * 2**COEFFICIENT_BITS).is_integer() for c in self.coefficients]
        if not 1 <= len(whole) <= MAX_NOISE_BANDS or self.coefficients[0] != 1.0 or not all(whole):
            raise ValueError(
                f"coefficients must be 1 to {MAX_NOISE_BANDS} multiples of 2^-{COEFFICIENT_BITS}, "
                f"the first of them 1, got {self.coefficients}"
            )

    @classmethod
    def square_root(cls, bands: int, planned_steps: int) -> Self:
        """Return the correlation with coefficients of the square root of the prefix-sum matrix.

        The coefficients are 1, 1/2, 3/8, ..., rounded to multiples of 2⁻¹⁶.

        Args:
            bands: number of coefficients, at least 1.
            planned_steps: number of steps of the whole run.
        """
        return cls(square_root_coefficients(bands), planned_steps)

    @property
    def bands(self) -> int:
        """Number of bands, which is the number of coefficients."""
        return len(self.coefficients)

    @cached_property
    def column_norm(self) -> float:
        """L2 norm ‖c‖ of the coefficients, which form the first column of the matrix C.

        Let x be the sums of clipped gradients, one for each step. An example with gradient norm 1
        in a single batch changes C x by at most ‖c‖ in L2 norm.
        """
        return math.hypot(*self.coefficients)

    @cached_property
    def noise_growth(self) -> float:
        """Largest standard deviation of a step's noise, as a multiple of that of fresh noise."""
        return float(np.linalg.norm(inverse_coefficients(self.coefficients, self.planned_steps)))


class NoiseStates:
    """Cache of the states of the clients' correlated noise in a process, kept between rounds.

    A client's state holds the noise of the last steps, from which the next noise is computed.

    Args:
        most_bytes: largest total size of the states, in bytes; the oldest states are dropped first.
    """

    def __init__(self, most_bytes: int = 1 << 28) -> None:
        self._most_bytes = most_bytes
        self._states: dict[object, BandedRows] = {}

    def take(self, owner: object, step: int) -> BandedRows | None:
        """Remove and return a client's state for the given step; None if it is not in the cache.

        Args:
            owner: the client's key in the cache, (seed, client).
            step: number of the next step to draw.
        """
        state = self._states.pop(owner, None)
        return state if state is not None and state.step == step else None

    def keep(self, owner: object, state: BandedRows) -> None:
        """Store a client's state for the next round.

        Args:
            owner: the client's key in the cache, (seed, client).
            state: the state, which the caller must not change afterwards.
        """
        self._states[owner] = state
        total = sum(stored.nbytes for stored in self._states.values())
        for other in list(self._states):
            if total <= self._most_bytes:
                break
            total -= self._states.pop(other).nbytes


class CorrelatedNoise(NoiseSource):
    """Source of one client's correlated noise, as integers in float64.

    The noise of step t is y_t = Z_t − rint(Σ_{j ≥ 1} c_j y_{t−j}), with fresh noise Z_t.

    Guarantee: y depends only on the client's fresh noise and the step, to the last bit. It depends
    on no data, on no other client, and not on the round of the step.

    Args:
        coefficients: the coefficients c_j of `NoiseCorrelation`, multiples of 2⁻¹⁶.
        fresh: function that returns the source of a step's fresh noise.
        like: a tensor (size,) on the device of the noise; each step has `size` noise values.
        first_step: number of the first step to draw, from 0.
        states: cache that may hold the state after the client's earlier rounds.
        owner: key of the client in `states`: (seed, client).
    """

    def __init__(
        self,
        coefficients: tuple[float, ...],
        fresh: Callable[[int], NoiseSource],
        *,
        like: Tensor,
        first_step: int,
        states: NoiseStates,
        owner: tuple[int, int],
    ) -> None:
        self._coefficients = coefficients
        self._fresh = fresh
        self._states = states
        self._owner = (*owner, coefficients, like.numel(), like.device)
        self._size, self._device = like.numel(), like.device
        self._next_step = first_step
        self._state = states.take(self._owner, first_step)
        self._row = like.new_empty(0)
        self._left = 0  # values of the step that are not drawn yet

    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor with the next noise values of the step, in place, and return it.

        When all values of a step are drawn, the next call begins the next step.

        Raises:
            TypeError: the tensor is not float64.
            ValueError: fewer values of the step are left than the tensor needs.
        """
        if values.dtype != torch.float64:
            raise TypeError(f"noise is whole numbers in float64, got a tensor of {values.dtype}")
        if self._left == 0 and values.numel():
            self._draw_step()
        start = self._size - self._left
        if values.numel() > self._left:
            raise ValueError(f"the step has {self._left} values left, got {values.numel()}")
        values.copy_(self._row[start : start + values.numel()].view(values.shape))
        self._left -= values.numel()
        return values

    def keep_state(self) -> None:
        """Store the state in `states` for the next round; nothing may be drawn afterwards."""
        if self._state is not None:
            self._states.keep(self._owner, self._state)

    def _draw_step(self) -> None:
        """Compute the noise of the next step."""
        state, self._state = self._state, None  # lost if an error cuts the step short
        if state is None:
            state = BandedRows(self._coefficients, self._size, self._device)
        while state.step <= self._next_step:
            self._row = state.next_row(self._fresh(state.step))
        self._next_step += 1
        self._left = self._size
        self._state = state
