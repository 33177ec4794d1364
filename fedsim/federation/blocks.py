"""Blocks of clients that train together in one vectorized computation, and their batch shapes.

Client numbers are divided into consecutive ranges. A worker process holds the data of whole ranges.
In each round the scheduled participants of each range are divided into blocks. A client that
withdrew or failed still counts as a member of its block. So blocks have the same members on one
worker, on many workers, and after a resume.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from fedsim.clients.app import one_thread
from fedsim.clients.gradients.padded_batches import padded_rows
from fedsim.clients.gradients.per_example import PerExampleGradients
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.model_checks.bit_isolation import MemberIsolation, RowIsolation
from fedsim.core.plugin_errors import plugin_calls
from fedsim.data import FederatedData
from fedsim.experiment import Experiment
from fedsim.federation.trained_model import NUM_CHECK_EXAMPLES, public_examples, to_tensors
from fedsim.server.participation.participation import Participation
from fedsim.server.participation.schedules import even_ranges

MAX_RANGES = 64
MAX_BATCH_RATIO = 2.0
"""Largest ratio of two members' expected batches, where padding takes longer than another block."""


@dataclass(frozen=True)
class BlockPlan:
    """The plan that divides the clients of a round into blocks (clients that train vectorized).

    Guarantee: the blocks are a function of the attributes, which the experiment fixes before round
    1. Workers, machines, withdrawals and failures do not change them. Every scheduled participant
    of a round is in exactly one block, and all members of a block are in one range.

    Attributes:
        participation: the rule that chooses the clients of each round.
        max_clients: the largest number of clients of a block, ≥ 1.
        expected_batches: the public expected batch size of each client, in examples.
        free_padding: rows of padding that take no longer than the fixed cost of a block.
    """

    participation: Participation
    max_clients: int
    expected_batches: tuple[float, ...]
    free_padding: int = 0
    _last_round: dict[int, Mapping[int, tuple[int, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Ranges of consecutive client numbers, which together contain all clients.

        A round has about as many ranges as blocks (groups of clients that train together); if these
        are more than `MAX_RANGES`, a range has several whole ones. The number of ranges is even if
        there is more than one, so that two workers get equally many.
        """
        clients = self.participation.num_clients
        _, participants = self.participation.round_sizes
        blocks = -(-participants // self.max_clients)
        ranges = -(-blocks // -(-blocks // MAX_RANGES))
        even = ranges + ranges % 2 if ranges > 1 else 1
        return even_ranges(clients, min(even, MAX_RANGES, clients))

    def blocks(self, round_number: int) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of a round (groups of clients that train together).

        A block is a tuple of client numbers, ascending. Blocks are sorted by their first clients.
        """
        scheduled = self.participation.in_round(round_number)
        ends = [bisect_left(scheduled, clients.stop) for clients in self.ranges]
        return tuple(
            block
            for start, end in pairwise([0, *ends])
            for part in even_ranges(end - start, max(1, -(-(end - start) // self.max_clients)))
            for block in self._split_by_batch(scheduled[start + part.start : start + part.stop])
        )

    def block_of(self, round_number: int, client: int) -> tuple[int, ...]:
        """Return the block of a client in a round: all clients that train with it, ascending.

        A client that is not scheduled in the round is alone in its block.

        Args:
            round_number: the round, ≥ 1.
            client: the client's number.
        """
        if round_number not in self._last_round:
            block_by_member = {
                member: block for block in self.blocks(round_number) for member in block
            }
            self._last_round.clear()
            self._last_round[round_number] = block_by_member
        return self._last_round[round_number].get(client, (client,))

    def _split_by_batch(self, clients: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield runs of clients for which one block takes less time than several.

        In a block, each member's batch is padded to the longest one. A run ends where its expected
        batches would differ by more than `MAX_BATCH_RATIO` and need more than `free_padding`.
        """
        start, least, most, total = 0, float("inf"), 0.0, 0.0
        for place, client in enumerate(clients):
            batch = self.expected_batches[client]
            least, most, total = min(least, batch), max(most, batch), total + batch
            padding = (place - start + 1) * most - total
            if most > MAX_BATCH_RATIO * least and padding > self.free_padding:
                yield clients[start:place]
                start, least, most, total = place, batch, batch, batch
        if start < len(clients):
            yield clients[start:]


_FULL_ROWS = 64  # rows of a place, where a batch is all examples of a client
_MAX_CLIENTS, _CNN_CLIENTS, _FEW_CLIENTS = 128, 8, 4
_FIXED_WORK = 1 << 24  # rows times trained values that take as long as the fixed cost of a block
_USUAL_VALUES = 5 << 19  # trainable values of all members: beyond, the fixed cost hardly counts
_MAX_BLOCK_VALUES = 1 << 24  # of a few members: 64 MB in float32
_MAX_GPU_VALUES = 1 << 26
_MIN_BLOCKS = 2  # in a round, so that two workers share it
_MAX_KEPT = 1024  # blocks whose number of rows is kept
_SLOW_LAYERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.GroupNorm, nn.InstanceNorm2d, nn.RNNBase),
)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a federation (groups of clients that train vectorized), with their batch sizes.

    Attributes:
        experiment: the settings.
        data: the clients' examples; client sizes are not read where they are private.
        model: the initial model.
        gradients: the method for per-example gradients of the model. With None each client trains
            alone, by torch's autograd, or as a teacher that votes.
        participation: the rule that chooses the clients of each round, in public or in secret.
        plans: the privacy plan of each client; None without privacy.
        device: the device that trains.
    """

    experiment: Experiment
    data: FederatedData
    model: nn.Module
    gradients: PerExampleGradients | None
    participation: Participation
    plans: tuple[PrivacyPlan, ...] | None
    device: torch.device
    _kept_rows: dict[tuple[int, ...], int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def plan(self) -> BlockPlan:
        """The plan that divides the clients of a round into blocks (clients that train together).

        Each client trains alone if the model cannot be vectorized over clients. Blocks are smaller
        where the padded batch of all members would exceed `max_physical_batch`.
        """
        size, participation = self._most, self.participation
        if not participation.is_keyed and size > 1:  # most clients of a block are absent
            size = min(participation.num_clients, round(size / participation.rate))
        values = 0 if self.gradients is None else self.gradients.parameters.size
        free = free_padding(self.model, values, is_on_gpu=self.device.type != "cpu")
        return BlockPlan(participation, size, tuple(self._expected_batches()), free)

    @property
    def places(self) -> int | None:
        """Number of places (equal groups of rows) that a block's clients share in a padded batch.

        With `unit: client` no shape may depend on a client's size or on a secret draw of clients.
        So a client's batch fills as many places as it needs, and an absent client fills none. The
        value is None for other units, where each client has a part of its own.
        """
        return self._most if self._has_private_sizes and self._most > 1 else None

    def rows(self, members: Sequence[int]) -> int:
        """Return the number of rows that each client of a block has in the block's padded batches.

        A block is a group of clients that train together. Absent clients have rows, too. The number
        is raised above the planned one if an example would otherwise affect the gradient of another
        on this machine.

        Guarantee: where the privacy unit is the client, the number of rows in a block of several
        members does not depend on any member's size.
        """
        block = tuple(members)
        rows = self._kept_rows.get(block)  # each member asks for the rows of all
        if rows is None:
            if len(self._kept_rows) >= _MAX_KEPT:
                self._kept_rows.clear()
            rows = self._kept_rows[block] = self._checked_rows(block)
        return rows

    def check(self, members: Sequence[int]) -> None:
        """Check on public examples that no example of a block affects the gradient of another one.

        A block is a group of clients that train together on one padded batch. Each shape of such a
        batch is checked once.

        Raises:
            UnsafeModelError: with any number of rows, an example affects the gradient of another on
                this machine; the message names the layer and the fix.
        """
        if self._isolation is None:
            return
        rows = self.rows(members)  # `RowIsolation` is checked here
        if isinstance(self._isolation, MemberIsolation):
            self._isolation.check(self.places or len(members), rows)

    def check_round(self, round_number: int) -> None:
        """Check that no example affects another's gradient in the padded batches of a round.

        Clients with privacy check their batches again when they train.

        Raises:
            UnsafeModelError: an example affects the gradient of another.
            PluginError: a plug-in fails.
        """
        if self.plans is not None:
            mixed = not self.experiment.plugins
            with one_thread(), plugin_calls("a plug-in failed before the first round", mixed=mixed):
                for block in self.plan.blocks(round_number):
                    self.check(block)

    @cached_property
    def _isolation(self) -> RowIsolation | MemberIsolation | None:
        if self.gradients is None:
            return None
        examples = to_tensors(public_examples(self.data, NUM_CHECK_EXAMPLES), self.device)
        local = self.experiment.local
        views = 1 if local.views is None else local.augmentation_multiplicity
        if self.experiment.release_kind.draws_batches:
            return RowIsolation(self.gradients, *examples, views=views)
        if not isinstance(self.gradients, RuleGradients):
            return None
        return MemberIsolation(self.gradients, *examples, views=views)

    @cached_property
    def _most(self) -> int:
        """The most clients that train vectorized in one block."""
        gradients, local = self.gradients, self.experiment.local
        if gradients is None or not gradients.stacks:
            return 1
        if not self.participation.is_keyed and not self._has_private_sizes:
            return 1
        _, participants = self.participation.round_sizes
        size = block_size(
            self.model,
            gradients.parameters.size,
            participants,
            local.vectorized_clients,
            is_on_gpu=self.device.type != "cpu",
        )
        if size == 1 or local.max_physical_batch is None:
            return size
        everybody = range(self.participation.num_clients)
        rows = self._packed_rows if self._has_private_sizes else self._planned_rows(everybody)
        return max(1, min(size, local.max_physical_batch // rows))

    def _checked_rows(self, members: tuple[int, ...]) -> int:
        rows, most = self._planned_rows(members), self.experiment.local.max_physical_batch
        if not isinstance(self._isolation, RowIsolation):
            return rows
        most = None if most is None else max(most // len(members), rows)
        with one_thread():
            return self._isolation.height(len(members), rows, most=most)

    def _planned_rows(self, members: Sequence[int]) -> int:
        local, size_of = self.experiment.local, self.data.clients.size  # all are in this process
        if self.experiment.release_kind.draws_batches:
            return max(self._step_rows[client] for client in members)
        if self.places is not None:
            return self._packed_rows
        usual = max(local.expected_batch(size_of(client)) for client in members)
        return padded_rows(usual, local.max_physical_batch)

    @property
    def _packed_rows(self) -> int:
        local = self.experiment.local
        usual = _FULL_ROWS if local.batch_size == "full" else local.batch_size
        return padded_rows(usual, local.max_physical_batch)

    @cached_property
    def _step_rows(self) -> tuple[int, ...]:
        """The rows of each private client in the padded batch of a block of one client."""
        return tuple(plan.release_as(DpSgdMechanism).padded_rows for plan in self.plans or ())

    def _expected_batches(self) -> Sequence[float]:
        """Return the public expected batch size of each client, by which blocks are divided."""
        if self._has_private_sizes:
            return [1.0] * self.participation.num_clients
        if self.plans is not None and self.experiment.release_kind.draws_batches:
            return [plan.release_as(DpSgdMechanism).expected_batch for plan in self.plans]
        return [
            float(self.experiment.local.expected_batch(size)) for size in self.data.clients.sizes
        ]

    @cached_property
    def _has_private_sizes(self) -> bool:
        """Whether the privacy unit is the client, so that its number of examples is private."""
        return self.experiment.release_kind.protects_client


def block_size(
    model: nn.Module,
    num_values: int,
    participants: int,
    setting: int | Literal["auto", "off"],
    *,
    is_on_gpu: bool = False,
) -> int:
    """Return the largest number of clients of a block, for a model that can be vectorized.

    In a block of K clients, a step of one client takes about F/K + c. F is the fixed cost of
    starting each operation, and c is the arithmetic of the client itself, which grows with the
    number of values. Measured in µs: F = 640 and c = 38 for a small MLP on an Intel Xeon; F = 5,900
    and c = 1,100 for 784-128-10 on a busy AMD processor without AVX-512. A CNN has a large c, and
    its activations leave the cache: beyond 8 clients some get faster (by 10 %) and others slower.
    On a GPU F decides: a private CNN trained 163 clients a second in blocks of 4, and 870 in blocks
    of 128 (an H200).

    Args:
        model: the model; its layer types decide whether it counts as a CNN.
        num_values: the number of trainable values of the model.
        participants: the number of clients of a round.
        setting: `local.vectorized_clients`; a number is returned unchanged, and "off" gives 1.
        is_on_gpu: whether a GPU trains. Its blocks are larger, and a round may be one block.
    """
    if setting == "off":
        return 1
    if setting != "auto":
        return setting
    values = max(1, num_values)
    if is_on_gpu:
        return max(1, min(_MAX_CLIENTS, participants, _MAX_GPU_VALUES // values))
    size = min(_MAX_CLIENTS, max(_FEW_CLIENTS, _USUAL_VALUES // values))
    if _is_slow(model):
        size = _CNN_CLIENTS
    balanced = max(_FEW_CLIENTS, participants // _MIN_BLOCKS)
    return max(1, min(size, balanced, _MAX_BLOCK_VALUES // values))


def free_padding(model: nn.Module, num_values: int, *, is_on_gpu: bool = False) -> int:
    """Return how many rows of padding take no longer than the fixed cost of a block.

    Measured on an AMD processor without AVX-512: a block of 64-1024-10 (76,810 values) costs 3.5
    ms, and a row 14 µs.

    Args:
        model: the model. Rows of a CNN take long on a CPU, so that no padding is free.
        num_values: the number of trainable values of the model.
        is_on_gpu: whether a GPU trains.
    """
    if _is_slow(model) and not is_on_gpu:
        return 0
    return _FIXED_WORK // max(1, num_values)


def _is_slow(model: nn.Module) -> bool:
    return any(isinstance(module, _SLOW_LAYERS) for module in model.modules())
