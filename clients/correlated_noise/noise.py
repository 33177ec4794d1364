"""Correlated noise as a source of draws: each step's fresh noise less a part of earlier noise.

The noise of step t depends on the fresh noise of all steps before it, and on nothing else. Fresh
noise is keyed by the step, so the state is computed anew where it is missing: after a restart, in
another process, in a repeated round. It is kept in the process to spare that, and never stored or
sent. All operations are exact in float64: the same bits on every processor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.noise.sources import NoiseSource


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
