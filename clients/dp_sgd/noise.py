"""Gaussian noise for a step, from a keyed stream."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor


class NoiseSource(ABC):
    """Where a client's noise comes from: independent standard normals, in order."""

    @abstractmethod
    def fill_(self, values: Tensor, standard_deviation: float) -> Tensor:
        """Fill `values` in place with independent N(0, standard_deviation²) and return it."""


class SeededNoise(NoiseSource):
    """Reproducible noise: torch's generator, started from a whole keyed stream.

    torch seeds its CPU generator with 32 bits only, too few to keep the streams of many clients and
    rounds apart; here all 19,937 bits of its Mersenne Twister come from the stream.

    Simulation grade: whoever knows the seed can subtract it, and float32 normals from 24-bit
    uniforms end at 5.8 standard deviations (a chance of 8e-9 a value).

    Args:
        stream: the keyed stream; its next 624 words become the generator's state.
    """

    def __init__(self, stream: np.random.Generator) -> None:
        words = stream.integers(0, 2**32, size=624, dtype=np.uint32)
        self._generator = generator_from_words(words)

    def fill_(self, values: Tensor, standard_deviation: float) -> Tensor:
        """Fill `values` in place with independent N(0, standard_deviation²) and return it."""
        if values.device.type == "cpu":
            values.normal_(generator=self._generator)
        else:  # the same noise on every device
            drawn = torch.empty(values.shape, dtype=values.dtype)
            values.copy_(drawn.normal_(generator=self._generator))
        return values.mul_(standard_deviation)


def generator_from_words(words: np.ndarray) -> torch.Generator:
    """Return torch's CPU generator with the 624 given words as its Mersenne Twister state.

    Raises:
        ValueError: `words` are not 624, or torch's state has another layout than known.
    """
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state().numpy().copy()
    # at::CPUGeneratorImplStateLegacy: seed, left, seeded, next, 624 words of 64 bits, normals.
    if len(words) != 624 or len(state) != _STATE_BYTES:
        raise ValueError(f"need 624 words and a state of {_STATE_BYTES} bytes, got {len(state)}")
    twister = state[24 : 24 + 624 * 8].view(np.uint64)
    twister[:] = words
    twister[0] |= 0x80000000  # an all-zero state would never leave zero
    generator.set_state(torch.from_numpy(state))
    return generator


_STATE_BYTES = 5056
