"""One client of a block: what it trains with, its random numbers, and what it releases."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.gradients.model_randomness import ModelRandomness
from fedsim.clients.gradients.tiles import tile_rows
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.contract import Mechanism, SumPart, UpdateRelease
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.training.shared_model import SharedModel
from fedsim.clients.training.streams import StreamKey
from fedsim.noise.sources import NoiseSource, NoNoise
from fedsim.protocol.noisy_sums import LearntBound


@dataclass(frozen=True)
class BlockMember:
    """One client of a block, before it trains.

    Attributes:
        features: its examples (n, ...).
        targets: their targets (n, ...).
        key: of its random streams.
        steps: numbers of its steps over its whole life.
        release: what it releases: its steps, or once a round its update or model; None: nothing, as
            without privacy, or where its examples are noisy.
        secure: whether lots and noise come from the operating system.
        part: its part of a noisy sum: its result is then integers of the grid, of its only step or
            of its update; None: its result is the trained values.
        start: flat values (size,) that it starts from; None: those of the loaded model.
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
        """The release of each local step; None where a round is one release, or none."""
        return self.release if isinstance(self.release, DpSgdMechanism) else None

    @property
    def update(self) -> UpdateRelease | None:
        """The release of the whole update, which is trained for without noise; None: another."""
        return self.release if isinstance(self.release, UpdateRelease) else None


@dataclass(frozen=True)
class BlockResult:
    """Result of a block's round.

    Attributes:
        values: flat trainable values of each member (members, size), or the integers of its part of
            a sum, in float64; of an absent one, any.
        adapted_clip_norm: clipping bound of each member after the round; None where it is fixed.
        counts: noisy centred bit of each member, from which the bound of whole updates is learnt;
            None where there is none.
    """

    values: Tensor
    adapted_clip_norm: tuple[LearntBound | None, ...]
    counts: tuple[float | None, ...]


StepCallback = Callable[
    [Sequence[np.ndarray | None], Tensor, Sequence[DpSgdMechanism | None]], None
]
"""Sees the lots, the releases (members, size) and the mechanisms of a step."""


class Block(ABC):
    """The members of a planned block before their round.

    Args:
        shared_model: loaded with the global model.
        members: in ascending order of clients; None: absent.
    """

    def __init__(self, shared_model: SharedModel, members: Sequence[BlockMember | None]) -> None:
        self.shared_model, self.members = shared_model, members

    @abstractmethod
    def train(self, on_step: StepCallback | None = None) -> BlockResult:
        """Train the members; a block trains once.

        Guarantee: a private member's values and bound are a function of the global model and of
        `len(steps)` releases of its mechanism, or of one release of its whole update or model. They
        do not depend on who else is present: the same member in the same planned block gets the
        same bits.

        Args:
            on_step: sees each step of private members, for an audit.
        """


def member_rows(member: BlockMember, local: LocalSettings) -> int:
    """Return R of the tiles of a block of one."""
    if member.mechanism is not None:
        return member.mechanism.tile_rows
    return tile_rows(local.lot(len(member.features)), local.max_physical_batch)


def with_releases(
    trained: BlockResult, shared_model: SharedModel, members: Sequence[BlockMember | None]
) -> BlockResult:
    """Return the members' results with the release of each whole update in place of its values."""
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
    """Return what gives the model's random functions numbers of the members' own examples."""
    present = [member for member in members if member is not None]
    keys = [None if m is None else m.key.model_randomness(secure=m.secure) for m in members]
    everybody = replace(present[0].key, client=0)
    shared = everybody.model_randomness(secure=any(member.secure for member in present))
    return ModelRandomness(keys, shared)


def start_values(shared_model: SharedModel, members: Sequence[BlockMember | None]) -> Tensor:
    """Return the values (members, size) that the members start from."""
    loaded = shared_model.start_values
    if all(one is None or one.start is None or one.start is loaded for one in members):
        return loaded.expand(len(members), -1)
    return torch.stack([loaded if m is None or m.start is None else m.start for m in members])


def sent_arrays(members: Sequence[BlockMember | None], like: Tensor) -> dict[str, Tensor]:
    """Return the algorithm's arrays (members, size) by name; zeros for absent members."""
    names = next((member.sent for member in members if member is not None), {})
    zeros = torch.zeros_like(like[0])
    return {
        name: torch.stack([zeros if one is None else one.sent[name] for one in members])
        for name in names
    }


def noise_of_update(member: BlockMember) -> NoiseSource:
    """Return a member's own noise; zeros where the server adds it."""
    if member.part is not None and not member.part.adds_noise:
        return NoNoise()
    return member.key.noise(secure=member.secure)
