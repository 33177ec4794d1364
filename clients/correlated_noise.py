"""Noise that is correlated from step to step: a banded Toeplitz factor of the prefix sums.

Fresh noise Z_t becomes y_t = Z_t − rint(Σ_{j ≥ 1} c_j y_{t−j}), so that a part of each step's noise
is taken back in the steps after it, and sums over many steps are less noisy. That is the matrix
mechanism with C lower-triangular, Toeplitz, and zero below its first bands: C y = Z (McMahan et al.
2024, arXiv:2405.15913; Choquette-Choo et al. 2023, arXiv:2306.08153). Theorem and proof:
docs/howto/correlated_noise.md.

The noise of step t depends on the fresh noise of all steps before it, and on nothing else. Fresh
noise is keyed by the step, so the state is computed anew where it is missing: after a restart, in
another process, in a repeated round. It is kept in the process to spare that, and never stored or
sent. All operations are exact in float64: the same bits on every processor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedsim.accountant import SelfComposed
from fedsim.accountant.checks import Floats
from fedsim.clients.sampling.sampling import Charges
from fedsim.core.limits import MAX_NOISE_BANDS
from fedsim.noise.sources import NoiseSource

COEFFICIENT_BITS = 16
"""Coefficients are multiples of 2⁻¹⁶: their products with noise below 2³² are exact in float64."""


@dataclass(frozen=True)
class NoiseCorrelation:
    """The correlation of a client's noise over its whole run.

    Guarantee: where an example can be in at most one of any `bands` successive lots, the releases
    of a run are, for this example, one release with noise multiplier z / ‖c‖ for each of these lots
    (docs/howto/correlated_noise.md). That is what `charges` returns.

    Attributes:
        coefficients: c_0 = 1, c_1, ..., each a multiple of 2⁻¹⁶; their number is the bands.
        planned_steps: steps of the whole run. They are charged together, before the first one.

    Raises:
        ValueError: a coefficient is not such a number, or the first is not 1.
    """

    coefficients: tuple[float, ...]
    planned_steps: int

    def __post_init__(self) -> None:
        whole = [(c * 2**COEFFICIENT_BITS).is_integer() for c in self.coefficients]
        if not 1 <= len(whole) <= MAX_NOISE_BANDS or self.coefficients[0] != 1.0 or not all(whole):
            raise ValueError(
                f"coefficients must be 1 to {MAX_NOISE_BANDS} multiples of 2^-{COEFFICIENT_BITS}, "
                f"the first of them 1, got {self.coefficients}"
            )

    @classmethod
    def toeplitz(cls, bands: int, planned_steps: int) -> Self:
        """Return the first bands of the square root of the prefix-sum matrix: 1, 1/2, 3/8, ...

        Args:
            bands: number of coefficients, at least 1.
            planned_steps: steps of the whole run.
        """
        return cls(square_root_coefficients(bands), planned_steps)

    @property
    def bands(self) -> int:
        """Number of coefficients."""
        return len(self.coefficients)

    @cached_property
    def column_norm(self) -> float:
        """‖c‖, the L2 norm of the coefficients: how far an example in one lot moves C x."""
        return math.hypot(*self.coefficients)

    def charges(self, cycle: Charges, first_step: int, steps: int) -> Charges:
        """Return (event, count) for some steps: all planned steps with the first one, then nothing.

        Args:
            cycle: (event, count) of all planned steps with noise that is not correlated.
            first_step: number of the first step.
            steps: number of steps.

        Raises:
            ValueError: the steps go beyond the plan.
        """
        if first_step + steps > self.planned_steps:
            raise ValueError(
                f"correlated noise is charged for {self.planned_steps} steps, and steps up to "
                f"{first_step + steps} are asked for"
            )
        if first_step or not steps:
            return []
        return [(SelfComposed(event, count), 1) for event, count in cycle]


@lru_cache(maxsize=MAX_NOISE_BANDS)
def square_root_coefficients(bands: int) -> tuple[float, ...]:
    """Return c_j = binomial(2 j, j) / 4^j for j < bands, rounded to multiples of 2⁻¹⁶."""
    exact = [1.0]
    for j in range(1, bands):
        exact.append(exact[-1] * (2 * j - 1) / (2 * j))
    unit = 2.0**COEFFICIENT_BITS
    return tuple(round(value * unit) / unit for value in exact)


def inverse_coefficients(coefficients: tuple[float, ...], steps: int) -> Floats:
    """Return the first column (steps,) of C⁻¹: y_t = Σ_j d_j Z_{t−j}, rounding aside.

    Args:
        coefficients: c of `NoiseCorrelation`.
        steps: number of rows of C, at least 1.
    """
    later = np.array(coefficients[1:])
    inverse = np.zeros(steps + len(later))  # zeros stand for the steps before the first
    inverse[len(later)] = 1.0
    for t in range(len(later) + 1, len(inverse)):
        inverse[t] = -(later @ inverse[t - len(later) : t][::-1])
    return inverse[len(later) :]


def prefix_error(coefficients: tuple[float, ...], steps: int) -> float:
    """Return the root mean square error of the sums of the first 1 ... `steps` releases.

    It is in standard deviations of the fresh noise Z: ‖A C⁻¹‖_F / √steps, with A the matrix of
    prefix sums. Noise without correlation has √((steps + 1) / 2).

    Args:
        coefficients: c of `NoiseCorrelation`.
        steps: T, at least 1.
    """
    sums = np.cumsum(inverse_coefficients(coefficients, steps))
    return math.sqrt(float(np.mean(np.cumsum(sums**2))))


@dataclass
class NoiseState:
    """The noise of the last steps.

    Attributes:
        step: the next step.
        past: noise (bands − 1, size) of the steps before, the one of step s in row s mod bands − 1.
    """

    step: int
    past: Tensor


class NoiseStates:
    """States of correlated noise that a process keeps from round to round, by their owner.

    Args:
        most_bytes: of all states together; the oldest make room for a new one.
    """

    def __init__(self, most_bytes: int = 1 << 28) -> None:
        self._most_bytes = most_bytes
        self._states: dict[object, NoiseState] = {}

    def take(self, owner: object, step: int) -> NoiseState | None:
        """Remove the owner's state and return it, if its next step is `step`."""
        state = self._states.pop(owner, None)
        return state if state is not None and state.step == step else None

    def keep(self, owner: object, state: NoiseState) -> None:
        """Keep a state, which nobody else may change from now on."""
        self._states[owner] = state
        total = sum(each.past.nbytes for each in self._states.values())
        for other in list(self._states):
            if total <= self._most_bytes:
                break
            total -= self._states.pop(other).past.nbytes


class CorrelatedNoise(NoiseSource):
    """Integers y_t = Z_t − rint(Σ_{j ≥ 1} c_j y_{t−j}) of one client, step by step.

    Guarantee: y is a function of the client's fresh noise and the step alone, to the last bit. It
    depends on no data, on no other client, and not on the round in which the step falls.

    Args:
        coefficients: c of `NoiseCorrelation`, multiples of 2⁻¹⁶.
        fresh: returns the fresh noise of a step.
        like: one release (size,); its size and device are those of the noise.
        first_step: the first step that is asked for; each takes `size` draws.
        states: holds the state of earlier rounds, if it is still there.
        owner: names the client and its seed in `states`.
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
        size, device = like.numel(), like.device
        self._coefficients = coefficients
        self._fresh = fresh
        self._states = states
        self._owner = (*owner, coefficients, size, device)
        self._next_step = first_step
        self._state = states.take(self._owner, first_step)
        self._row = torch.empty(size, dtype=torch.float64, device=device)
        self._left = 0  # values of the step that are not asked for yet

    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor in place with the next draws of the step and return it.

        Raises:
            TypeError: the tensor has another type.
            ValueError: the tensor goes beyond the end of the step.
        """
        if values.dtype != torch.float64:
            raise TypeError(f"noise is whole numbers in float64, got a tensor of {values.dtype}")
        if self._left == 0 and values.numel():
            self._draw_step()
        start = self._row.numel() - self._left
        if values.numel() > self._left:
            raise ValueError(f"the step has {self._left} values left, got {values.numel()}")
        values.copy_(self._row[start : start + values.numel()].view(values.shape))
        self._left -= values.numel()
        return values

    def keep_state(self) -> None:
        """Leave the state to the next round; no more draws may follow."""
        if self._state is not None:
            self._states.keep(self._owner, self._state)

    def _draw_step(self) -> None:
        """Draw the noise of the next step."""
        state, self._state = self._state, None  # lost if an error cuts the step short
        if state is None:
            past = self._row.new_zeros(len(self._coefficients) - 1, self._row.numel())
            state = NoiseState(0, past)
        while state.step <= self._next_step:
            self._advance(state)
        self._next_step += 1
        self._left = self._row.numel()
        self._state = state

    def _advance(self, state: NoiseState) -> None:
        """Compute the noise of the state's next step."""
        row, past = self._row, state.past
        self._fresh(state.step).fill_(row)
        rows = len(past)
        back = torch.zeros_like(row)
        for j, coefficient in enumerate(self._coefficients[1 : state.step + 1], start=1):
            back.add_(past[(state.step - j) % rows], alpha=coefficient)
        row.sub_(back.round_())
        past[state.step % rows] = row
        state.step += 1
