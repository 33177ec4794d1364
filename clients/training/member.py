"""A member of a block: the data, random streams and release of one client, and its results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.gradients.model_randomness import ModelRandomness
from fedsim.clients.gradients.padded_batches import padded_rows
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.contract import Mechanism, SumPart, UpdateRelease
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.training.shared_model import SharedModel
from fedsim.clients.training.streams import StreamKey
from fedsim.noise.sources import NoiseSource, NoNoise
from fedsim.protocol.noisy_sums import AdaptiveClipNorm


@dataclass(frozen=True)
class BlockMember:
    """One client of a block, before it trains.

    Attributes:
        features: features of the client's examples (n, ...).
        targets: targets of the client's examples (n, ...).
        key: key of the client's random streams in this round.
        steps: numbers of the steps to take, counted over all rounds of the run.
        release: mechanism of the client's releases: each step, or once a round the update or the
            model; None without privacy, and where the examples are noisy already.
        secure: whether batches and noise come from the operating system.
        part: the client's share of a noisy sum, where its result is integers on the grid; None
            where its result is trained parameters.
        start: flat parameters (size,) that the client starts from; None for those of the loaded
            model.
        sent: flat arrays (size,) of the algorithm by name.
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
        """The DP-SGD mechanism, with a release for each local step; None with another or none."""
        return self.release if isinstance(self.release, DpSgdMechanism) else None

    @property
    def update(self) -> UpdateRelease | None:
        """The mechanism that releases the whole update once a round; None with another or none."""
        return self.release if isinstance(self.release, UpdateRelease) else None


@dataclass(frozen=True)
class BlockResult:
    """The results of a block's clients after a round.

    Attributes:
        values: trained parameters (members, size), flat, or in float64 the integers of the members'
            shares of a noisy sum; rows of absent members are arbitrary.
        adapted_clip_norm: adaptive clip norm of each member after the round; None where it is
            fixed.
        counts: noisy centred bit of each member, from which the server adapts the clip norm of
            whole updates; None where the clip norm is fixed.
    """

    values: Tensor
    adapted_clip_norm: tuple[AdaptiveClipNorm | None, ...]
    counts: tuple[float | None, ...]


StepCallback = Callable[
    [Sequence[np.ndarray | None], Tensor, Sequence[DpSgdMechanism | None]], None
]
"""Callback of a step; it gets the batches, the releases (members, size) and the mechanisms."""


class Block(ABC):
    """A planned block of clients that trains for one round.

    Args:
        shared_model: loaded with the global model.
        members: the planned members in ascending order of clients; an entry is None where the
            client is absent.
    """

    def __init__(self, shared_model: SharedModel, members: Sequence[BlockMember | None]) -> None:
        self.shared_model, self.members = shared_model, members

    @abstractmethod
    def train(self, on_step: StepCallback | None = None) -> BlockResult:
        """Train the members and return their results; a block trains only once.

        Guarantee: a private member's values and clip norm are a function of the global model and of
        `len(steps)` releases of its mechanism, or of one release of its whole update or model. They
        do not depend on which other members are present: the same member in the same planned block
        gets the same bits.

        Args:
            on_step: callback of each step of private members, for an audit.
        """


def member_rows(member: BlockMember, local: LocalSettings) -> int:
    """Return the number of rows R of a member's padded batch where it trains alone.

    Args:
        member: the client.
        local: batch size and largest physical batch, which count without privacy.
    """
    if member.mechanism is not None:
        return member.mechanism.padded_rows
    return padded_rows(local.expected_batch(len(member.features)), local.max_physical_batch)


def with_releases(
    trained: BlockResult, shared_model: SharedModel, members: Sequence[BlockMember | None]
) -> BlockResult:
    """Return the results with noisy updates, for members that release whole updates.

    Args:
        trained: the results of training, without noise for these members.
        shared_model: loaded with the global model.
        members: the planned members; an entry is None where the client is absent.
    """
    private = [(k, m, m.update) for k, m in enumerate(members) if m is not None and m.update]
    if not private:
        return trained
    rows, starts, counts = [k for k, *_ in private], start_values(shared_model, members), {}
    released = private[0][2].release_updates(
        trained.values[rows],
        starts[rows],
        [update for *_, update in private],
        [noise_of_update(member) for _, member, _ in private],
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
    """Return the source of the model's random numbers, such as dropout, keyed by example."""
    present = [member for member in members if member is not None]
    keys = [None if m is None else m.key.model_randomness(secure=m.secure) for m in members]
    shared_key = replace(present[0].key, client=0)
    shared = shared_key.model_randomness(secure=any(member.secure for member in present))
    return ModelRandomness(keys, shared)


def start_values(shared_model: SharedModel, members: Sequence[BlockMember | None]) -> Tensor:
    """Return the flat parameters (members, size) that the members start from.

    Args:
        shared_model: loaded with the global model.
        members: the planned members; an entry is None where the client is absent.
    """
    loaded = shared_model.start_values
    if all(m is None or m.start is None or m.start is loaded for m in members):
        return loaded.expand(len(members), -1)
    return torch.stack([loaded if m is None or m.start is None else m.start for m in members])


def sent_arrays(members: Sequence[BlockMember | None], like: Tensor) -> dict[str, Tensor]:
    """Return the algorithm's arrays (members, size) by name, with zeros for absent members.

    Args:
        members: the planned members; an entry is None where the client is absent.
        like: parameters (members, size), for the type and device of the zeros.
    """
    names = next((member.sent for member in members if member is not None), {})
    zeros = torch.zeros_like(like[0])
    return {
        name: torch.stack([zeros if member is None else member.sent[name] for member in members])
        for name in names
    }


def noise_of_update(member: BlockMember) -> NoiseSource:
    """Return the noise source of a member's update: no noise where the server adds it."""
    if member.part is not None and not member.part.adds_noise:
        return NoNoise()
    return member.key.noise(secure=member.secure)
