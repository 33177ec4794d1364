"""Random streams of one client in one round."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from fedsim.clients.dp_sgd.noise import NoiseSource, SecureNoise, SeededNoise, secret_stream
from fedsim.clients.dp_sgd.sampling import Sampling
from fedsim.core.streams import Purpose, seed_sequence, stream


@dataclass(frozen=True)
class StreamKey:
    """Key of every random stream of one client in one round."""

    seed: int
    client: int
    round_number: int

    def generator(self, purpose: Purpose) -> np.random.Generator:
        """Return the stream for `purpose`."""
        return stream(self.seed, purpose, client=self.client, round_number=self.round_number)

    def epoch(self, number: int) -> np.random.Generator:
        """Return the stream that divides the client's examples in an epoch; no round enters it."""
        return stream(self.seed, Purpose.EPOCH, client=self.client, round_number=number)

    def lots(
        self,
        sampling: Sampling,
        num_examples: int,
        *,
        first_step: int,
        secure: bool = False,
        stream: np.random.Generator | None = None,
    ) -> Iterator[np.ndarray]:
        """Return the lots of the round, without end.

        Args:
            sampling: draws the lots.
            num_examples: examples of the client.
            first_step: steps of the client before this round.
            secure: whether independent lots are drawn from the operating system.
            stream: a fresh stream for `Purpose.SAMPLING`; None: it is made here.
        """
        steps = secret_stream() if secure else stream or self.generator(Purpose.SAMPLING)
        return sampling.lots(num_examples, steps, epochs=self.epoch, first_step=first_step)

    def noise(
        self, *, secure: bool = False, stream: np.random.Generator | None = None
    ) -> NoiseSource:
        """Return the noise source of the round.

        Args:
            secure: whether noise comes from the operating system and cannot be repeated.
            stream: a fresh stream for `Purpose.NOISE`; None: it is made here.
        """
        return SecureNoise() if secure else SeededNoise(stream or self.generator(Purpose.NOISE))

    def torch_seed(self, purpose: Purpose) -> int:
        """Return a seed for torch's own generators (dropout); not used for noise."""
        sequence = seed_sequence(
            self.seed, purpose, client=self.client, round_number=self.round_number
        )
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def seeded_torch(key: StreamKey, device: torch.device) -> Iterator[None]:
    """Seed torch's generator (dropout) from the client's stream, and restore it afterwards."""
    seed = key.torch_seed(Purpose.DROPOUT)
    if device.type != "cpu":
        with torch.random.fork_rng(devices=[device]):
            torch.manual_seed(seed)
            yield
        return
    # As above, without torch's record of the caller, which takes longer than a small step.
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
