"""Random streams of a client in a round, keyed by seed, client, round and purpose."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from fedsim.clients.augmentation import Views
from fedsim.clients.gradients.model_randomness import KEY_BYTES
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.sampling.sampling import Sampling
from fedsim.core.streams import Purpose, generator_of, stream, stream_key, torch_seed
from fedsim.noise.sources import NoiseSource, SecureNoise, SeededNoise, secret_stream


@dataclass(frozen=True)
class StreamKey:
    """Key of the random streams of one client in one round.

    Attributes:
        seed: the experiment's seed.
        client: number of the client.
        round_number: the round ≥ 1.
    """

    seed: int
    client: int
    round_number: int

    def key_bytes(self, purpose: Purpose) -> bytes:
        """Return the 32-byte key of the client's stream for a purpose."""
        return stream_key(self.seed, purpose, client=self.client, round_number=self.round_number)

    def generator(self, purpose: Purpose) -> np.random.Generator:
        """Return the random generator of the client's stream for a purpose."""
        return generator_of(self.key_bytes(purpose))

    def epoch(self, number: int) -> np.random.Generator:
        """Return the stream that divides the client's examples in an epoch, in any round."""
        return stream(self.seed, Purpose.EPOCH, client=self.client, round_number=number)

    def draw_batches(
        self, sampling: Sampling, num_examples: int, *, first_step: int, secure: bool = False
    ) -> Iterator[np.ndarray]:
        """Return an endless iterator over the client's batches of the round, as example indices.

        Args:
            sampling: the scheme that draws batches.
            num_examples: number of the client's examples.
            first_step: number of the client's steps before this round.
            secure: whether independent batches are drawn with randomness of the operating system.
        """
        steps = secret_stream() if secure else self.generator(Purpose.SAMPLING)
        return sampling.draw_batches(num_examples, steps, epochs=self.epoch, first_step=first_step)

    def views(self, local: LocalSettings) -> Views | None:
        """Return the source of the client's random views in the round; None without views."""
        if local.views is None:
            return None
        return Views(local.augmentation_multiplicity, local.views, self.generator(Purpose.VIEWS))

    def noise(self, *, secure: bool = False) -> NoiseSource:
        """Return the noise source of the round.

        Args:
            secure: whether noise comes from the operating system and cannot be repeated.
        """
        return SecureNoise() if secure else SeededNoise(self.key_bytes(Purpose.NOISE))

    def model_randomness(self, *, secure: bool = False) -> bytes:
        """Return the key of the random numbers that the model draws in the round, as in dropout.

        Args:
            secure: whether the key comes from the operating system and cannot be repeated.
        """
        return os.urandom(KEY_BYTES) if secure else self.key_bytes(Purpose.DROPOUT)[:KEY_BYTES]

    def step_noise(self, step: int) -> NoiseSource:
        """Return the fresh noise of a step, counted over all rounds of the run.

        Args:
            step: number of the client's step over the run, from 0.
        """
        key = stream_key(self.seed, Purpose.STEP_NOISE, client=self.client, round_number=step)
        return SeededNoise(key)


def generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of torch's random generator on a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def seeded_torch(key: StreamKey, device: torch.device) -> Iterator[None]:
    """Seed torch's random generator within the context, and restore its state afterwards.

    Args:
        key: key of the client's random streams.
        device: device of the generator.
    """
    seed = torch_seed(key.key_bytes(Purpose.DROPOUT))
    if device.type != "cpu":
        with torch.random.fork_rng(devices=[device]):
            torch.manual_seed(seed)
            yield
        return
    # The same without torch.manual_seed, whose record of the caller takes longer than a small step.
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
