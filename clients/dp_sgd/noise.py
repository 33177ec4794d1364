"""Gaussian noise for a step, from a keyed stream."""

import numpy as np
import torch
from torch import Tensor


class SeededNoise:
    """Gaussian noise drawn in order from one keyed stream.

    Drawn as float64 by numpy's ziggurat and rounded to the target's type: torch seeds its CPU
    generator with 32 bits only, too few to keep the streams of many clients and rounds apart.

    Simulation grade: whoever knows the seed can subtract it.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def add_(self, total: Tensor, standard_deviation: float) -> Tensor:
        """Add independent N(0, standard_deviation²) to every entry of `total` in place."""
        # Drawn also when it is scaled to nothing: the stream's position never depends on settings.
        noise = self._generator.standard_normal(total.numel())
        if standard_deviation > 0:
            scaled = torch.from_numpy(noise * standard_deviation).view(total.shape)
            total.add_(scaled.to(total))
        return total
