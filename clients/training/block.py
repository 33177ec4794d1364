"""Local training of a block (clients that train together on stacked tensors) in one round.

A block may also be a single client. All clients of a block have the same model architecture,
clipping rule and local settings. Their clip norms, noise, random streams and numbers of steps may
differ. A client that is absent from the round still has rows in every padded batch, so the shapes
of all tensors are known in advance.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsim.algorithms.algorithm import ClientRule
from fedsim.clients.correlated_noise import CorrelatedNoise
from fedsim.clients.gradients.padded_batches import BatchReader
from fedsim.clients.gradients.per_example import (
    BatchStatistics,
    PaddedBatch,
    PerExampleGradients,
    PerExampleLoss,
)
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.contract import ModelRelease
from fedsim.clients.mechanisms.dp_sgd.batch_sums import BatchSums, StepTerms
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.dp_sgd.step import PrivateStep
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.training.member import (
    Block,
    BlockMember,
    BlockResult,
    StepCallback,
    generator_state,
    member_rows,
    randomness_of,
    seeded_torch,
    sent_arrays,
    start_values,
    with_releases,
)
from fedsim.clients.training.plain import TorchBlock, batches_of
from fedsim.clients.training.shared_model import SharedModel, make_optimizer
from fedsim.core.streams import Purpose
from fedsim.noise.sources import NoiseSource
from fedsim.protocol.noisy_sums import AdaptiveClipNorm


def block_of(
    shared_model: SharedModel,
    loss: PerExampleLoss,
    gradients: PerExampleGradients | None,
    local: LocalSettings,
    members: Sequence[BlockMember | None],
    *,
    rows: int | None = None,
    places: int | None = None,
    rule: ClientRule | None = None,
) -> "Block":
    """Return a block (clients that train together on stacked tensors) for one round.

    Args:
        shared_model: the model, with the global model loaded. After training, it holds the result
            if the block has one client.
        loss: function of (outputs, targets) that returns one value per example.
        gradients: object that computes per-example gradients; None to train without privacy by
            torch's autograd.
        local: settings with batch size and optimizer.
        members: the clients of the block in ascending order; None for a client that is absent.
        rows: rows of each member in a padded batch; None for as many as the present members need.
        places: None if each member has its own rows in a padded batch. Otherwise a padded batch has
            `places` slots of `rows` rows, and each slot holds rows of any one member. This is for
            training without privacy; still no bit of a member's result depends on other members.
        rule: rule by which the algorithm changes the (noisy) gradient of a step, or None.

    Raises:
        ValueError: no member is present, private and other members are mixed, members clip by
            different rules, or a model that cannot be stacked has several members.
    """
    present = [member for member in members if member is not None]
    if not present:
        raise ValueError("a block needs at least one member that is present, got none")
    if any(isinstance(member.release, ModelRelease) for member in present):
        return _ModelBlock(shared_model, members)
    if len(members) > 1 and (gradients is None or not gradients.stacks):
        raise ValueError(f"this model trains clients one at a time, got {len(members)} in a block")
    shared_model.restart()
    shared_model.model.train()
    if gradients is None:
        if present[0].mechanism is not None:
            raise ValueError("training with privacy needs per-example gradients")
        return TorchBlock(shared_model, loss, local, present[0], rule)
    if len({None if m.mechanism is None else m.mechanism.clipping.kind for m in present}) > 1:
        raise ValueError("members of a block must clip by one rule, or all train without privacy")
    if present[0].mechanism is None:
        return _SgdBlock(shared_model, gradients, local, members, rows, rule, places)
    return _DpSgdBlock(shared_model, gradients, local, members, rows, rule)


class _ModelBlock(Block):
    """Members under output perturbation: they train without noise and release their models once."""

    def train(self, on_step: StepCallback | None = None) -> BlockResult:
        """Train the members and return the noisy releases of their models."""
        members, shared_model = self.members, self.shared_model
        values = start_values(shared_model, members).clone()
        for k, member in enumerate(members):
            if member is not None and isinstance(member.release, ModelRelease):
                released = member.release.release_model(
                    values[k],
                    member.features,
                    member.targets,
                    member.key.noise(secure=member.secure),
                    order=member.key.generator(Purpose.SAMPLING).permutation(len(member.features)),
                    steps=len(member.steps),
                )
                values[k] = released.to(values)
        if len(members) == 1:
            shared_model.parameters.data.copy_(values[0])
        return BlockResult(values, (None,) * len(members), (None,) * len(members))


class _SgdBlock(Block):
    """Members that train without privacy, by minibatch SGD on the mean loss.

    Attributes:
        sends_releases: whether the result is the release of the only step, as integers, in place of
            the trained parameters.
    """

    sends_releases = False

    def __init__(
        self,
        shared_model: SharedModel,
        gradients: PerExampleGradients,
        local: LocalSettings,
        members: Sequence[BlockMember | None],
        rows: int | None,
        rule: ClientRule | None,
        places: int | None = None,
    ) -> None:
        super().__init__(shared_model, members)
        self.gradients, self.local = gradients, local
        present = [member for member in members if member is not None]
        data = [None if m is None else (m.features, m.targets) for m in members]
        rows = max(member_rows(m, local) for m in present) if rows is None else rows
        self.rows = rows
        self._batches = [None if m is None else self.draw_batches(m) for m in members]
        start = start_values(shared_model, members)
        self._rule, self._start, self._sent = rule, start, sent_arrays(members, start)
        views = [None if m is None else m.key.views(local) for m in members]
        self._reader = BatchReader(
            data,
            rows,
            dtype=start.dtype,
            views=None if local.views is None else views,
            randomness=None if gradients.draws is False else randomness_of(members),
        )
        self.values = start.clone()
        self.released = self.values.new_empty(len(members), 0)
        self._first = present[0]
        self._round_number = self._first.key.round_number
        settings = local.optimizer_in(self._round_number)
        self._optimizers = [make_optimizer(settings) for _ in members]
        self._keeps = False
        self._place: slice | None = None  # of the parameters that a step moves
        self.step_number = 0  # of the round
        self.places = places

    @property
    def has_drawn(self) -> bool | None:
        """Whether the model draws random numbers; None before the first forward pass."""
        randomness = self._reader.randomness
        if randomness is None or not randomness.has_begun:
            return self.gradients.draws
        return randomness.has_drawn

    @property
    def mechanisms(self) -> Sequence[DpSgdMechanism | None]:
        """Each member's mechanism for the next step; None without privacy."""
        return [None] * len(self.members)

    def draw_batches(self, member: BlockMember) -> Iterator[np.ndarray]:
        """Return an endless iterator over a member's batches, as indices of examples."""
        return batches_of(self.local, len(member.features), member.key)

    def train(self, on_step: StepCallback | None = None) -> BlockResult:
        """Take all steps of all members and return their results."""
        self._keeps = on_step is not None or self.sends_releases
        ends = [0 if member is None else len(member.steps) for member in self.members]
        final = {k: self.values[k].clone() for k, end in enumerate(ends) if end == 0}
        with self._keyed_draws():
            for step in range(max(ends)):
                batches = [
                    next(batches) if batches and step < end else None
                    for batches, end in zip(self._batches, ends, strict=True)
                ]
                used = () if on_step is None else self.mechanisms
                self.step_number = step
                self._place = self.gradients.begin_step(self._round_number, step, self.values)
                self.take_step(batches)
                if on_step is not None:
                    on_step(batches, self.released, used)
                if self.sends_releases:
                    break
                for k, end in enumerate(ends):
                    if end == step + 1 < max(ends):
                        final[k] = self.values[k].clone()
            for k, row in final.items():  # later steps of other members changed these rows
                self.values[k] = row
            return self._result()

    def _result(self) -> BlockResult:
        """Return the parameters after the last step, or the releases of whole updates or steps."""
        nothing = (None,) * len(self.members)
        if self.sends_releases:
            return BlockResult(self.released, self.adapted_clip_norms(), nothing)
        self.end()
        trained = BlockResult(self.values, self.adapted_clip_norms(), nothing)
        result = with_releases(trained, self.shared_model, self.members)
        if len(self.members) == 1 and self._first.part is None:
            self.shared_model.parameters.data.copy_(result.values[0])
        return result

    @contextmanager
    def _keyed_draws(self) -> Iterator[None]:
        """Check that the model draws no random numbers of torch's generator within the block.

        Only numbers that are keyed by example are allowed.

        Raises:
            UnsafeModelError: the state of torch's generator has changed.
        """
        device = self._first.features.device
        with seeded_torch(self._first.key, device):
            before = generator_state(device)
            yield
            if not torch.equal(before, generator_state(device)):
                raise UnsafeModelError(
                    "the model draws random numbers in its backward pass, or in some rounds only, "
                    "so they cannot be keyed by example; draw them in every forward pass"
                )
        self.gradients.draws = self.has_drawn

    def end(self) -> None:
        """Store the state that the next round needs."""

    def use_gradients(self, clients: slice, gradients: Tensor) -> None:
        """Move the parameters of some members by one step, or keep their releases.

        Args:
            clients: slice of the members, the same in every step.
            gradients: their gradients or releases (k, size); they may be overwritten.
        """
        if self._keeps:
            if self.released.shape[1] != gradients.shape[1]:
                self.released = gradients.new_empty(len(self.members), gradients.shape[1])
            self.released[clients] = gradients
        if self.sends_releases:
            return
        values, optimizer = self.values[clients], self._optimizers[clients.start]
        if self._rule is not None:
            sent = {name: array[clients] for name, array in self._sent.items()}
            self._rule.change_(gradients, values, self._start[clients], sent)
        optimizer.step([values if self._place is None else values[:, self._place]], [gradients])

    def take_step(self, batches: Sequence[np.ndarray | None]) -> None:
        """Compute the members' gradients of a step, and use them.

        Args:
            batches: indices of the examples in each member's batch; None for a member that does not
                take this step.
        """
        sizes = [1 if batch is None else max(1, len(batch)) for batch in batches]
        shares = torch.tensor(sizes).to(self.values).reciprocal_()
        total = self.values.new_zeros(len(batches), self.gradients.parameters.size)
        if self.places is None:
            for padded in self._reader.padded_batches(batches, self.step_number):
                self._add_sums(self.values, padded, shares, total)
        else:
            sums = self.values.new_empty(self.places, self.values.shape[1])
            for members, padded in self._reader.packed(batches, self.places, self.step_number):
                filled = len(members)
                index = torch.tensor([*members, *[0] * (self.places - filled)])
                index = index.to(self.values.device)
                self._add_sums(self.values[index], padded, shares[index], sums.zero_())
                total.index_put_((index[:filled],), sums[:filled], accumulate=True)
        self.use_gradients(slice(0, len(batches)), total)

    def _add_sums(self, values: Tensor, padded: PaddedBatch, shares: Tensor, into: Tensor) -> None:
        """Add the gradient of each place to `into`, with its examples weighted by `shares`."""
        share = (shares / padded.views).unsqueeze(1)
        weights = (padded.weights.view(padded.clients, -1) * share).flatten()
        self.gradients.add_sums(values, replace(padded, weights=weights), into)

    def adapted_clip_norms(self) -> tuple[AdaptiveClipNorm | None, ...]:
        """Return each member's adaptive clip norm after the round; None where it is fixed."""
        return (None,) * len(self.members)


class _DpSgdBlock(_SgdBlock):
    """Members that train by DP-SGD: the optimizer sees the noisy releases alone."""

    def __init__(
        self,
        shared_model: SharedModel,
        gradients: PerExampleGradients,
        local: LocalSettings,
        members: Sequence[BlockMember | None],
        rows: int | None,
        rule: ClientRule | None,
    ) -> None:
        super().__init__(shared_model, gradients, local, members, rows, rule)
        self._mechanisms = [None if m is None else m.mechanism for m in members]
        self._noises = [None if m is None else self._noise_of(m) for m in members]
        self._added = [  # to gradients
            noise if mechanism is not None and mechanism.noise_multiplier else None
            for noise, mechanism in zip(self._noises, self._mechanisms, strict=True)
        ]
        self._adapts = any(norm is not None for norm in self.adapted_clip_norms())
        present = [member for member in members if member is not None]
        self.sends_releases = any(member.part is not None for member in present)
        fits = all(member.part is not None and len(member.steps) == 1 for member in present)
        if self.sends_releases and not fits:
            raise ValueError("a part of a noisy sum is one step, the same for all of a block")
        roundings = [None if m is None else m.rounding for m in self._mechanisms]
        self._sums = BatchSums(gradients.parameters, roundings, self.rows)
        kind = torch.float64 if self.sends_releases else gradients.parameters.tensors[0].dtype
        self._into = self._sums.new_releases(kind)
        self._terms = self._new_terms()

    def _new_terms(self) -> StepTerms:
        """Return the clipping norms and scales of the members' mechanisms as they are now."""
        return StepTerms.of(
            self._mechanisms, self.gradients.parameters, self.rows, divides=not self.sends_releases
        )

    def _noise_of(self, member: BlockMember) -> NoiseSource:
        """Return a member's noise source of the round.

        Raises:
            ValueError: the member has correlated noise and secure noise, which exclude each other.
        """
        key, mechanism = member.key, member.mechanism
        correlation = None if mechanism is None else mechanism.correlation
        if correlation is None or (member.part is not None and not member.part.adds_noise):
            return key.noise(secure=member.secure, part=member.part)
        if member.secure:
            raise ValueError("correlated noise is computed again from the seed, got secure noise")
        return CorrelatedNoise(
            correlation.coefficients,
            key.step_noise,
            like=self.values[0],
            first_step=member.steps.start,
            states=self.shared_model.noise_states,
            owner=(key.seed, key.client),
        )

    @property
    def mechanisms(self) -> Sequence[DpSgdMechanism | None]:
        """Each member's mechanism for the next step."""
        return tuple(self._mechanisms)

    def draw_batches(self, member: BlockMember) -> Iterator[np.ndarray]:
        """Return an endless iterator over a member's batches, drawn by its sampling."""
        if member.mechanism is None:
            raise ValueError("a private block has private members")
        first, secure = member.steps.start, member.secure
        sampling, n = member.mechanism.sampling, len(member.features)
        return member.key.draw_batches(sampling, n, first_step=first, secure=secure)

    def end(self) -> None:
        """Store the state of correlated noise."""
        for noise in self._noises:
            if isinstance(noise, CorrelatedNoise):
                noise.keep_state()

    def take_step(self, batches: Sequence[np.ndarray | None]) -> None:
        """Compute the active members' noisy releases of a step, and use them.

        Args:
            batches: indices of the examples in each member's batch; None for a member that does not
                take this step.
        """
        noises = [
            None if batch is None else noise
            for batch, noise in zip(batches, self._added, strict=True)
        ]
        padded_batches = self._reader.padded_batches(batches, self.step_number)
        self._sums.begin([0 if batch is None else len(batch) for batch in batches])
        step = PrivateStep(self._terms, self._sums, self._into, noises, self.use_gradients)
        norms = step.take(partial(self.gradients.clipped, self.values), padded_batches)
        if self._adapts:
            self._adapt(batches, norms.statistics())

    def adapted_clip_norms(self) -> tuple[AdaptiveClipNorm | None, ...]:
        """Return each member's adaptive clip norm after the round; None where it is fixed."""
        return tuple(None if m is None else m.clipping.adapted_clip_norm for m in self._mechanisms)

    def _adapt(
        self, batches: Sequence[np.ndarray | None], counts: Sequence[BatchStatistics]
    ) -> None:
        """Update the adaptive clip norm of each active member from the counts of its batch."""
        for k, batch in enumerate(batches):
            mechanism, noise = self._mechanisms[k], self._noises[k]
            if batch is not None and mechanism is not None and noise is not None:
                self._mechanisms[k] = mechanism.adapt(counts[k], noise)
        self._terms = self._new_terms()
