"""Random streams of a client in a round, each fixed by seed, client, round and purpose."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from fedsim.clients.augmentation import Views
from fedsim.clients.gradients.model_randomness import KEY_BYTES
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.contract import SumPart
from fedsim.clients.sampling.sampling import Sampling
from fedsim.core.streams import Purpose, generator_of, stream, stream_key, torch_seed
from fedsim.noise.sources import NoiseSource, NoNoise, SecureNoise, SeededNoise, secret_stream


@dataclass(frozen=True)
class StreamKey:
    """Seed, client and round, which fix the random streams of a client in a round.

    Attributes:
        seed: the experiment's seed.
        client: number of the client.
        round_number: the round ≥ 1.
    """

    seed: int
    client: int
    round_number: int

    def key_bytes(self, purpose: Purpose) -> bytes:
        """Return the 32-byte key of the client's random stream for a purpose, such as noise."""
        return stream_key(self.seed, purpose, client=self.client, round_number=self.round_number)

    def generator(self, purpose: Purpose) -> np.random.Generator:
        """Return the random generator of the client's stream for a purpose, such as sampling."""
        return generator_of(self.key_bytes(purpose))

    def epoch(self, number: int) -> np.random.Generator:
        """Return the random generator that divides the examples into batches in an epoch.

        An epoch may span several rounds, so this stream does not depend on the round.
        """
        return stream(self.seed, Purpose.EPOCH, client=self.client, round_number=number)

    def draw_batches(
        self, sampling: Sampling, num_examples: int, *, first_step: int, secure: bool = False
    ) -> Iterator[np.ndarray]:
        """Return an endless iterator over the client's batches, each an array of example indices.

        Args:
            sampling: the sampling that draws batches.
            num_examples: number of the client's examples.
            first_step: number of steps that the client took before this round.
            secure: whether batches are drawn from the operating system's random numbers, not from
                the seed. The division of an epoch into batches always follows from the seed.
        """
        steps = secret_stream() if secure else self.generator(Purpose.SAMPLING)
        return sampling.draw_batches(num_examples, steps, epochs=self.epoch, first_step=first_step)

    def views(self, local: LocalSettings) -> Views | None:
        """Return the source of the client's random augmented views, or None without views."""
        if local.views is None:
            return None
        return Views(local.augmentation_multiplicity, local.views, self.generator(Purpose.VIEWS))

    def noise(self, *, secure: bool = False, part: SumPart | None = None) -> NoiseSource:
        """Return the noise source of the client in the round; of zeros if the server adds noise.

        Args:
            secure: whether noise comes from the operating system and so never repeats.
            part: the noise of a sum over clients; None if the client's noise alone protects it.
        """
        if part is not None and not part.adds_noise:
            return NoNoise()
        return SecureNoise() if secure else SeededNoise(self.key_bytes(Purpose.NOISE))

    def model_randomness(self, *, secure: bool = False) -> bytes:
        """Return the key of the random numbers that the model draws in the round, as in dropout.

        Args:
            secure: whether the key comes from the operating system and so never repeats.
        """
        return os.urandom(KEY_BYTES) if secure else self.key_bytes(Purpose.DROPOUT)[:KEY_BYTES]

    def step_noise(self, step: int) -> NoiseSource:
        """Return the source of the fresh noise of a step; steps are counted over all rounds.

        Args:
            step: number of the client's step in the whole run, from 0.
        """
        key = stream_key(self.seed, Purpose.STEP_NOISE, client=self.client, round_number=step)
        return SeededNoise(key)


def generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of torch's random generator on a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def seeded_torch(key: StreamKey, device: torch.device) -> Iterator[None]:
    """Seed torch's random generator during a `with` block, and restore its state afterwards.

    Args:
        key: key of the client's random streams.
        device: device whose generator is seeded.
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
