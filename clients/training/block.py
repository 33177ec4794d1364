"""One round of a block of clients: the only way in which clients train.

A block is planned by the experiment (which clients, in which order), whoever of its members takes
part. A client alone is a block of one member.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleGradients, PerExampleLoss
from fedsim.clients.settings import LocalSettings
from fedsim.clients.training.cohorts import CohortMember, train_alone, train_together
from fedsim.clients.training.local_training import StreamKey
from fedsim.clients.training.shared_model import SharedModel


@dataclass(frozen=True)
class BlockMember:
    """One client of a block, before it trains.

    Attributes:
        features: its examples (n, ...).
        targets: their targets (n, ...).
        key: of its random streams.
        steps: numbers of its steps over its whole life.
        step: its mechanism; None without privacy.
        secure: whether lots and noise come from the operating system.
    """

    features: Tensor
    targets: Tensor
    key: StreamKey
    steps: range
    step: DpSgdMechanism | None = None
    secure: bool = False


@dataclass(frozen=True)
class BlockResult:
    """Result of a block's round.

    Attributes:
        values: flat trainable values of each planned member (members, size). The rows of absent
            members have no meaning.
        adapted_clip_norm: clipping bound of each planned member after the round; None where it is
            fixed or the member is absent.
    """

    values: Tensor
    adapted_clip_norm: tuple[float | None, ...]


def train_block(
    shared_model: SharedModel,
    loss: PerExampleLoss,
    gradients: PerExampleGradients | None,
    local: LocalSettings,
    members: Sequence[BlockMember | None],
) -> BlockResult:
    """Train the members of one block from the global model.

    Guarantee: the row of a member is a function of the member, the global model, and the number and
    place of planned members, to the bit. The other members, present or absent, do not enter it.

    A model whose buffers change in training (batch statistics, without privacy) needs a block of
    one client; `shared_model` then holds the client's buffers.

    Args:
        shared_model: loaded with the global model.
        loss: one value per example.
        gradients: per-example gradients of the model; None without privacy.
        local: batch size and optimizer.
        members: all planned members in ascending order of clients; None for an absent one.

    Raises:
        ValueError: `gradients` is None for a private member, or several members would overwrite
            each other's buffers.
    """
    present = [
        (row, _cohort_member(member)) for row, member in enumerate(members) if member is not None
    ]
    values = shared_model.start_values.new_zeros(len(members), shared_model.parameters.size)
    clip_norms: list[float | None] = [None] * len(members)
    plain = any(member.step is None for _, member in present)
    buffers = next(iter(shared_model.model.buffers()), None) is not None
    if plain and buffers and len(present) > 1:
        raise ValueError("a model with buffers trains in blocks of one client")
    for group in _groups(present):
        rows = torch.tensor([row for row, _ in group], device=values.device)
        cohort = [member for _, member in group]
        if len(cohort) > 1:
            result = train_together(shared_model, loss, local, cohort)
            values[rows] = result.values
            norms = result.adapted_clip_norm
        else:
            norms = (train_alone(shared_model, loss, gradients, local, cohort[0]),)
            values[rows[0]] = shared_model.parameters.data
        for (row, _), norm in zip(group, norms, strict=True):
            clip_norms[row] = norm
    return BlockResult(values, tuple(clip_norms))


def _cohort_member(member: BlockMember) -> CohortMember:
    return CohortMember(
        member.features, member.targets, member.key, member.steps, member.step, member.secure
    )


def _groups(present: list[tuple[int, CohortMember]]) -> Iterator[list[tuple[int, CohortMember]]]:
    """Yield the members that can train together: of one rule, shape and number of steps."""
    kinds: dict[object, list[tuple[int, CohortMember]]] = {}
    for row, member in present:
        clipping = None if member.step is None else member.step.clipping.kind
        shape = (member.features.shape[1:], member.features.dtype)
        kinds.setdefault((clipping, shape, len(member.steps)), []).append((row, member))
    yield from kinds.values()
