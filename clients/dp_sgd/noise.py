"""Gaussian noise for a step: reproducible from a keyed stream, or from the operating system."""

import os
from abc import ABC, abstractmethod

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
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


class SecureNoise(NoiseSource):
    """Noise that nobody can predict or repeat: AES-256-CTR, keyed by the operating system.

    Normals come from 53-bit uniforms by Box-Muller in float64 (they end at 8.6 standard deviations,
    a chance of 1e-17 a value) and are scaled before they are rounded to the tensor's type. It takes
    no seed, and a process that forks gets a key of its own.

    What it is not: a discrete mechanism. The sum is floating point, so attacks on its rounding
    (Mironov 2012; Jin et al. 2022) remain.
    """

    def __init__(self) -> None:
        self._process = -1

    def fill_(self, values: Tensor, standard_deviation: float) -> Tensor:
        """Fill `values` in place with independent N(0, standard_deviation²) and return it."""
        if self._process != os.getpid():
            self._start()
        count = values.numel()
        normals = np.empty(count)
        for start in range(0, count, _CHUNK):  # bounds the memory of the uniforms
            part = normals[start : start + _CHUNK]
            part[:] = self._normals(len(part))
        normals *= standard_deviation
        return values.copy_(torch.from_numpy(normals).view(values.shape))

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("secure noise cannot be copied or stored: the copy would repeat it")

    def _start(self) -> None:
        """Start a keystream; after a fork the parent's key would give both the same noise."""
        key = algorithms.AES256(os.urandom(32))
        # The counter may start at zero: the key is used for one stream only.
        self._keystream = Cipher(key, modes.CTR(bytes(16))).encryptor()
        self._process = os.getpid()

    def _normals(self, count: int) -> np.ndarray:
        pairs = -(-count // 2)
        words = np.frombuffer(self._keystream.update(bytes(16 * pairs)), dtype="<u8")
        uniforms = (words >> np.uint64(11)) * 2.0**-53  # in [0, 1), 53 bits, exact
        radius = np.sqrt(-2.0 * np.log(uniforms[:pairs] + 2.0**-53))  # of (0, 1]: never log 0
        angle = 2.0 * np.pi * uniforms[pairs:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def secret_stream() -> np.random.Generator:
    """Return a stream that nobody can predict or repeat: 256 bits from the operating system.

    For lots, which are never seen; noise, which is, comes from `SecureNoise`.
    """
    entropy = int.from_bytes(os.urandom(32), "big")
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(entropy)))


def generator_from_words(words: np.ndarray) -> torch.Generator:
    """Return torch's CPU generator with the 624 given words as its Mersenne Twister state.

    It then continues like any MT19937 whose state are these words, the highest bit of the first one
    set, and whose next draw starts a new block.

    Raises:
        ValueError: `words` are not 624, or torch's state has another layout than known.
    """
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state().numpy().copy()
    # at::CPUGeneratorImplStateLegacy: seed, left, seeded, next, 624 words of 64 bits, normals.
    if len(words) != 624 or len(state) != _STATE_BYTES:
        raise ValueError(
            f"need 624 words and a state of {_STATE_BYTES} bytes, got {len(words)} and {len(state)}"
        )
    twister = state[24 : 24 + 624 * 8].view(np.uint64)
    twister[:] = words
    twister[0] |= 0x80000000  # an all-zero state would never leave zero
    generator.set_state(torch.from_numpy(state))
    return generator


_STATE_BYTES = 5056
_CHUNK = 1 << 20
