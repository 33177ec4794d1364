"""How the clients of each round train together: their blocks, and the shapes of their tiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from fedsim.clients.app import one_thread
from fedsim.clients.gradients.interface import PerExampleGradients
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.gradients.tiles import tile_rows
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.model_checks.bit_isolation import MemberIsolation, RowIsolation
from fedsim.core.plugin_errors import plugin_calls
from fedsim.data import FederatedData
from fedsim.experiment import Experiment
from fedsim.federation.block_plan import BlockPlan
from fedsim.federation.initial_model import NUM_CHECK_EXAMPLES, public_examples, to_tensors
from fedsim.server.participation.participation import Participation

_FULL_ROWS = 64  # of a place, where batches are all examples of a client
_MAX_SMALL_CLIENTS, _MAX_LARGE_CLIENTS, _MAX_IMAGE_CLIENTS = 128, 16, 4
_MAX_SMALL_VALUES = 1 << 15
_MAX_BLOCK_VALUES = 1 << 24  # trainable values of all members: 64 MB in float32
_MIN_BLOCKS = 8  # of a round, so that workers stay in balance
_MIN_CLIENTS = 4
_SLOW_LAYERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.GroupNorm, nn.InstanceNorm2d, nn.RNNBase),
)


@dataclass(frozen=True)
class Blocks:
    """The blocks of an experiment's clients.

    Attributes:
        experiment: the settings.
        data: the clients' examples; with private sizes they enter nothing here.
        model: the initial model.
        gradients: of the model; None: each client trains alone, by torch or by votes.
        participation: the clients of each round, or their secret draw.
        plans: privacy plan of each client; None without privacy.
        device: the device that trains.
    """

    experiment: Experiment
    data: FederatedData
    model: nn.Module
    gradients: PerExampleGradients | None
    participation: Participation
    plans: tuple[PrivacyPlan, ...] | None
    device: torch.device

    @cached_property
    def plan(self) -> BlockPlan:
        """The clients that train together in each round.

        They train alone where the model cannot train in blocks, and in smaller blocks where one
        tile of all members would exceed `max_physical_batch`.
        """
        size, participation = self._most, self.participation
        if not participation.is_keyed and size > 1:  # most clients of a block are absent
            size = min(participation.num_clients, round(size / participation.rate))
        return BlockPlan(participation, size, tuple(self._expected_lots()))

    @cached_property
    def places(self) -> int | None:
        """Places of a tile, which any members of a block fill; None: each has a place of its own.

        Where the unit is the client, no shape may depend on a client's size or on a secret draw. So
        a lot takes as many places as it needs, and an absent client takes none.
        """
        return self._most if self._has_private_sizes and self._most > 1 else None

    def rows(self, members: Sequence[int]) -> int:
        """Return the rows of each member in the tiles of a block, present or not.

        They are the planned ones, or the next that keep examples apart on this machine.

        Guarantee: where the unit is the client, the rows of several members do not depend on the
        size of any.
        """
        rows, most = self._planned_rows(members), self.experiment.local.max_physical_batch
        if not isinstance(self._isolation, RowIsolation):
            return rows
        most = None if most is None else max(most // len(members), rows)
        with one_thread():
            return self._isolation.height(len(members), rows, most=most)

    def check(self, members: Sequence[int]) -> None:
        """Check the tiles of a planned block on public examples, once for each shape.

        Raises:
            UnsafeModelError: they do not keep examples apart on this machine, at any height; the
                message names the layer and the fix.
        """
        if self._isolation is None:
            return
        rows = self.rows(members)  # of single examples, these are checked
        if isinstance(self._isolation, MemberIsolation):
            self._isolation.check(self.places or len(members), rows)

    def check_round(self, round_number: int) -> None:
        """Check the tiles of all blocks of a round; private clients check them again.

        Raises:
            UnsafeModelError: as of `check`.
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
        views = 1 if local.views is None else local.augmentations
        if self.experiment.release_kind.draws_lots:
            return RowIsolation(self.gradients, *examples, views=views)
        if not isinstance(self.gradients, RuleGradients):
            return None
        return MemberIsolation(self.gradients, *examples, views=views)

    @cached_property
    def _most(self) -> int:
        """Most clients that train together."""
        gradients, local = self.gradients, self.experiment.local
        if gradients is None or not gradients.stacks:
            return 1
        if not self.participation.is_keyed and not self._has_private_sizes:
            return 1
        _, participants = self.participation.round_sizes
        size = block_size(self.model, gradients.parameters.size, participants, local.cohort)
        if size == 1 or local.max_physical_batch is None:
            return size
        everybody = range(self.participation.num_clients)
        rows = self._packed_rows if self._has_private_sizes else self._planned_rows(everybody)
        return max(1, min(size, local.max_physical_batch // rows))

    def _planned_rows(self, members: Sequence[int]) -> int:
        local, size_of = self.experiment.local, self.data.clients.size  # all are in this process
        if self.experiment.release_kind.draws_lots:
            return max(self._step_rows[client] for client in members)
        if self.places is not None:
            return self._packed_rows
        usual = max(local.lot(size_of(client)) for client in members)
        return tile_rows(usual, local.max_physical_batch)

    @property
    def _packed_rows(self) -> int:
        local = self.experiment.local
        usual = _FULL_ROWS if local.batch_size == "full" else local.batch_size
        return tile_rows(usual, local.max_physical_batch)

    @cached_property
    def _step_rows(self) -> tuple[int, ...]:
        """Rows of each private client in the tiles of a block of one."""
        return tuple(plan.release_as(DpSgdMechanism).tile_rows for plan in self.plans or ())

    def _expected_lots(self) -> Sequence[float]:
        """Return the public expected lot of each client, by which blocks are cut."""
        if self._has_private_sizes:
            return [1.0] * self.participation.num_clients
        if self.plans is not None and self.experiment.release_kind.draws_lots:
            return [plan.release_as(DpSgdMechanism).expected_lot for plan in self.plans]
        return [float(self.experiment.local.lot(size)) for size in self.data.clients.sizes]

    @property
    def _has_private_sizes(self) -> bool:
        """Whether the number of examples of a client is a part of what is protected."""
        return self.experiment.release_kind.protects_client


def block_size(
    model: nn.Module, num_values: int, participants: int, setting: int | Literal["auto", "off"]
) -> int:
    """Return the most clients of a block, for a model that can train in blocks.

    A step of one client in a block of K takes about F/K + c: the fixed cost F of starting each
    operation, and the arithmetic c of the client itself. Measured on an Intel Xeon, in µs: F = 640
    and c = 38 for a small MLP, F = 500 and c = 650 for 784-128-10. A CNN has c = 3,400, and blocks
    larger than 4 gain nothing.

    Args:
        model: the architecture.
        num_values: trainable values of the model.
        participants: clients of a round.
        setting: `local.cohort`; a number is returned as it is.
    """
    if setting == "off":
        return 1
    if setting != "auto":
        return setting
    if any(isinstance(module, _SLOW_LAYERS) for module in model.modules()):
        size = _MAX_IMAGE_CLIENTS
    else:
        size = _MAX_SMALL_CLIENTS if num_values <= _MAX_SMALL_VALUES else _MAX_LARGE_CLIENTS
    balanced = max(_MIN_CLIENTS, participants // _MIN_BLOCKS)
    return max(1, min(size, balanced, _MAX_BLOCK_VALUES // max(1, num_values)))
