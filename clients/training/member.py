"""Members of a block (clients that train together on stacked tensors), with their random streams.

The random streams of a client in a round are each fixed by seed, client, round and purpose.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.gradients.example_randomness import KEY_BYTES, ModelRandomness, Views
from fedsim.clients.gradients.padded_batches import padded_rows
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.contract import Mechanism, SumPart, UpdateRelease
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.sampling.sampling import Sampling
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.streams import Purpose, generator_of, stream, stream_key, torch_seed
from fedsim.noise.sources import NoiseSource, NoNoise, SecureNoise, SeededNoise, secret_stream
from fedsim.protocol.noisy_sums import AdaptiveClipNorm


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


@dataclass(frozen=True)
class BlockMember:
    """One client of a block (clients that train together), before it trains.

    Attributes:
        features: features of the client's examples (n, ...).
        targets: targets of the client's examples (n, ...).
        key: key of the client's random streams in this round.
        steps: numbers of the local steps of this round. DP-SGD numbers steps over the whole run,
            and all other training from 0 in each round.
        release: privacy mechanism of the client. It releases each local step, or once a round the
            whole update or the model. None without privacy, or if the examples are already noisy.
        secure: whether batches and noise come from the operating system.
        part: the noise of a sum over clients, if the client's result is integers for a noisy sum;
            None if the result is trained parameters.
        start: flat parameters (size,) from which the client starts; None for the loaded model.
        sent: flat arrays (size,) that the algorithm sends beside the model, by name.
    """

    features: Tensor
    targets: Tensor
    key: StreamKey
    steps: range
    release: Mechanism | None = None
    secure: bool = False
    part: SumPart | None = None
    start: Tensor | None = None
    sent: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def mechanism(self) -> DpSgdMechanism | None:
        """DP-SGD mechanism that releases each local step; None if the client does not use it."""
        return self.release if isinstance(self.release, DpSgdMechanism) else None

    @property
    def update(self) -> UpdateRelease | None:
        """Mechanism that releases a round's whole update; None if the client does not use one."""
        return self.release if isinstance(self.release, UpdateRelease) else None


@dataclass(frozen=True)
class BlockResult:
    """Results of a block (clients that train together) after a round.

    Attributes:
        values: trained parameters of each member (members, size). With noisy sums, the integers
            that each member contributes, in float64. Rows of absent members are arbitrary.
        adapted_clip_norm: adaptive clip norm of each member after the round; None if it is fixed.
        counts: for each member, noise plus ½ if the update was not clipped, or noise minus ½ if it
            was clipped. With noisy sums, the unit is integer-grid steps. From these values the
            server adapts the clip norm of whole updates. None if the clip norm is fixed.
    """

    values: Tensor
    adapted_clip_norm: tuple[AdaptiveClipNorm | None, ...]
    counts: tuple[float | None, ...]


StepCallback = Callable[
    [Sequence[np.ndarray | None], Tensor, Sequence[DpSgdMechanism | None]], None
]
"""Callback of a step; it gets the batches, the releases (members, size) and the mechanisms."""


class Block(ABC):
    """Base class of a block: clients that train together for one round.

    Args:
        shared_model: the model, with the global model loaded.
        members: the clients of the block in ascending order; None for an absent client.
    """

    def __init__(self, shared_model: SharedModel, members: Sequence[BlockMember | None]) -> None:
        self.shared_model, self.members = shared_model, members

    @abstractmethod
    def train(self, on_step: StepCallback | None = None) -> BlockResult:
        """Train the members and return their results; a block can train only once.

        Guarantee: a private member's values and clip norm depend only on the global model and on
        the member's releases: one release for each step, or one release of the whole update or
        model. No bit of the results depends on which other members are present.

        Args:
            on_step: function that is called after each step of private members, for an audit.
        """


def member_rows(member: BlockMember, local: LocalSettings) -> int:
    """Return the number of rows of a padded batch for a client that trains alone.

    Args:
        member: the client.
        local: settings with batch size and largest physical batch, which are used without DP-SGD.
    """
    if member.mechanism is not None:
        return member.mechanism.padded_rows
    return padded_rows(local.expected_batch(len(member.features)), local.max_physical_batch)


def with_releases(
    trained: BlockResult, shared_model: SharedModel, members: Sequence[BlockMember | None]
) -> BlockResult:
    """Return the results with noise on the updates of members that release whole updates.

    Args:
        trained: the results of training; the updates of these members have no noise yet.
        shared_model: the model, with the global model loaded.
        members: the clients of the block; None for an absent client.
    """
    private = [(k, m, m.update) for k, m in enumerate(members) if m is not None and m.update]
    if not private:
        return trained
    rows, starts, counts = [k for k, *_ in private], start_values(shared_model, members), {}
    released = private[0][2].release_updates(
        trained.values[rows],
        starts[rows],
        [update for *_, update in private],
        [m.key.noise(secure=m.secure, part=m.part) for _, m, _ in private],
        [len(member.features) > 0 for _, member, _ in private],
    )
    on_grid, values = private[0][1].part is not None, starts.double().clone()
    if on_grid:
        values[rows] = released.steps
    else:
        lengths = values.new_tensor([[update.update_step] for *_, update in private])
        values[rows] += released.steps * lengths
    for count, (k, _, update) in zip(released.counts, private, strict=True):
        counts[k] = count if on_grid or count is None else count * update.count_step
    return replace(
        trained,
        values=values if on_grid else values.to(starts),
        counts=tuple(map(counts.get, range(len(members)))),
    )


def randomness_of(members: Sequence[BlockMember | None]) -> ModelRandomness:
    """Return the source of the random numbers that the model draws, as in dropout.

    An example's random numbers do not depend on the rest of the batch.
    """
    present = [member for member in members if member is not None]
    keys = [None if m is None else m.key.model_randomness(secure=m.secure) for m in members]
    shared_key = replace(present[0].key, client=0)
    shared = shared_key.model_randomness(secure=any(member.secure for member in present))
    return ModelRandomness(keys, shared)


def start_values(shared_model: SharedModel, members: Sequence[BlockMember | None]) -> Tensor:
    """Return the flat parameters (members, size) from which the members start.

    Args:
        shared_model: the model, with the global model loaded.
        members: the clients of the block; None for an absent client.
    """
    loaded = shared_model.start_values
    if all(m is None or m.start is None or m.start is loaded for m in members):
        return loaded.expand(len(members), -1)
    return torch.stack([loaded if m is None or m.start is None else m.start for m in members])


def sent_arrays(members: Sequence[BlockMember | None], like: Tensor) -> dict[str, Tensor]:
    """Return, by name, the arrays that the algorithm sends to clients beside the model.

    Each array has shape (members, size), with zeros for absent members.

    Args:
        members: the clients of the block; None for an absent client.
        like: parameters (members, size), whose dtype and device the zeros get.
    """
    names = next((member.sent for member in members if member is not None), {})
    zeros = torch.zeros_like(like[0])
    return {
        name: torch.stack([zeros if member is None else member.sent[name] for member in members])
        for name in names
    }
