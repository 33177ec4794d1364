"""Public random directions, each a function of seed, round, step and number of the direction alone.

A step moves the model along its directions, each times a coefficient. Server and clients must
compute the same model from the coefficients, bit for bit. So directions are drawn by numpy on the
CPU, and updates are added in a fixed order without fused operations.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedsim.core.streams import Purpose, restart_at, stream
from fedsim.zeroth_order.settings import ZerothOrderSettings

_MAX_KEPT_VALUES = 1 << 22  # 16 MB


@dataclass(frozen=True)
class Directions:
    """Random directions of an experiment, along which steps measure the loss and move the model.

    Attributes:
        seed: the experiment's seed; it may be public, because directions do not depend on data.
        size: the number d of trained values of the model.
        settings: the number of directions in a step, and their distribution.
    """

    seed: int
    size: int
    settings: ZerothOrderSettings
    _kept: dict[tuple[int, int, int], NDArray[np.float32]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def direction(self, round_number: int, step: int, number: int) -> NDArray[np.float32]:
        """Return a random direction as a read-only float32 array (d,).

        Args:
            round_number: number of the round, from 1.
            step: number of the step in the round, from 0.
            number: number of the direction in the step, from 0.
        """
        key = round_number, step, number
        direction = self._kept.get(key)
        if direction is None:
            direction = self._drawn(*key)
            direction.flags.writeable = False
            if self.size <= _MAX_KEPT_VALUES:
                if (len(self._kept) + 1) * self.size > _MAX_KEPT_VALUES:
                    self._kept.clear()
                self._kept[key] = direction
        return direction

    def _drawn(self, round_number: int, step: int, number: int) -> NDArray[np.float32]:
        generator = stream(self.seed, Purpose.DIRECTIONS, round_number=round_number)
        restart_at(generator, step, number)
        if self.settings.distribution == "gaussian":
            return generator.standard_normal(self.size).astype(np.float32)
        bits = np.unpackbits(generator.integers(0, 256, -(-self.size // 8), dtype=np.uint8))
        return bits[: self.size].astype(np.float32) * np.float32(2) - np.float32(1)

    def add_round(
        self, values: NDArray[np.generic], coefficients: NDArray[np.generic], round_number: int
    ) -> None:
        """Add a round's update to the trained values, in place.

        The update is the sum, over all directions of all steps, of coefficient times direction.

        Args:
            values: trained values as one flat array (d,).
            coefficients: coefficient of each of K steps and P directions, (K, P).
            round_number: number of the round, from 1.
        """
        for step, row in enumerate(coefficients):
            for number, coefficient in enumerate(row):
                if coefficient:
                    factor = np.asarray(coefficient, values.dtype)
                    direction = self.direction(round_number, step, number)
                    np.add(values, np.multiply(direction, factor), out=values)
