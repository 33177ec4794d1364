"""Step of an attached optimizer: it sums a batch, charges, adds noise and updates the model."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.sampler_slack import MAX_DRAWS
from fedsim.clients.gradients.per_example import BatchStatistics
from fedsim.clients.mechanisms.dp_sgd.batch_sums import (
    BatchSums,
    StepNorms,
    StepTerms,
    products_are_exact,
)
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.dp_sgd.step import PrivateStep, Use
from fedsim.clients.privacy_engine.attachment import AttachedModel
from fedsim.clients.privacy_engine.batch_schedule import (
    BatchSchedule,
    BudgetExhaustedError,
    EngineStreams,
)
from fedsim.clients.privacy_engine.loaders import BatchFeed, BatchReuseError
from fedsim.clients.privacy_engine.outside_batches import OutsideBatchError
from fedsim.clients.privacy_engine.recorded_pass import PaddedRecording, RecordedPass
from fedsim.clients.privacy_engine.terms import PrivacyTerms
from fedsim.core.errors import FedsimError
from fedsim.noise.sources import NoiseSource


@dataclass(frozen=True)
class _OpenBatch:
    """The clipped sum of the physical batches of a logical batch so far, in grid steps.

    Attributes:
        total: the sum (1, size), float64.
        norms: gradient norms of the summed examples.
    """

    total: Tensor
    norms: Sequence[StepNorms]

    @property
    def examples(self) -> int:
        """Number of summed examples."""
        return sum(norms.sizes[0] for norms in self.norms)


logger = logging.getLogger(__name__)

_WAYS = (
    "either call engine.check_isolation(loss, x, y) once, now or later, with the same loss and a "
    "few public examples of all kinds of labels; or call engine.backward(losses) in place of "
    "loss.backward(), with one loss for each example (reduction='none')"
)


class UncheckedLossError(FedsimError, RuntimeError):
    """Error if ε is unknown, because nobody has checked that the loss keeps examples apart.

    It is raised after `loss.backward()` ran on such a loss.
    """


@dataclass
class LossEvidence:
    """Record of whether all losses so far are known not to mix examples.

    A reduced loss may divide by something that depends on all examples, as a mean with class
    weights or ignored labels does, or by an undeclared number. Then one example changes the
    gradients of all others, and backward passes do not show this.

    Attributes:
        has_plain_backward: whether gradients came from `loss.backward()` of a loss that the engine
            did not compute for each example.
        is_checked: whether `check_isolation` has checked the loss.
    """

    has_plain_backward: bool = False
    is_checked: bool = False

    def note_plain_backward(self) -> None:
        """Record that gradients came from `loss.backward()` of a loss that may mix examples."""
        if not self.has_plain_backward and not self.is_checked:
            logger.warning(
                "loss.backward() does not show whether the loss keeps examples apart, so "
                "get_epsilon() will refuse; %s",
                _WAYS,
            )
        self.has_plain_backward = True

    def require(self) -> None:
        """Check that every loss is known not to mix examples.

        Raises:
            UncheckedLossError: `loss.backward()` ran, but the loss was not checked.
        """
        if self.has_plain_backward and not self.is_checked:
            raise UncheckedLossError(
                "no epsilon is known: loss.backward() ran, and whether the loss keeps examples "
                f"apart was not checked; {_WAYS}"
            )

    def restore(self, state: Mapping[str, bool]) -> None:
        """Restore the attributes from a dict; a true `is_checked` stays true."""
        self.has_plain_backward = bool(state["has_plain_backward"])
        self.is_checked = self.is_checked or bool(state["is_checked"])


class PrivateSteps:
    """Steps of an engine: they sum physical batches and release each logical batch once.

    Guarantee: a release is in `ledger` before the optimizer sees it. A batch is released at most
    once, even if the step is interrupted. Noise is added once per logical batch.

    Attributes:
        mechanism: the DP-SGD mechanism of the next step.
        ledger: the ledger with all charges.
        schedule: object that draws the batches and computes the charges.
        feed: source that yields the batches of `schedule` to the training loop.
        losses: record of whether the losses are known not to mix examples.

    Args:
        model: the attached model, which computes the clipped sums.
        mechanism: the DP-SGD mechanism for this model.
        terms: the engine's public terms.
        streams: the engine's random streams.
    """

    def __init__(
        self,
        model: AttachedModel,
        mechanism: DpSgdMechanism,
        terms: PrivacyTerms,
        streams: EngineStreams,
    ) -> None:
        self.mechanism = mechanism
        self.ledger = PrivacyLedger()
        self.schedule = BatchSchedule(terms, streams)
        self.feed = BatchFeed(self.schedule, terms.max_physical_batch, self.drop)
        self.losses = LossEvidence()
        self._norms: Sequence[StepNorms] = ()  # of the last batch
        self._model, self._terms, self._streams = model, terms, streams
        self._batch: _OpenBatch | None = None
        self._made: tuple[tuple[object, ...], StepTerms, BatchSums] | None = None
        model.passes.part = lambda: self.feed.part

    @property
    def is_open(self) -> bool:
        """Whether a logical batch is unfinished: parts of it are summed, but it is not released."""
        return self._batch is not None

    @property
    def private_statistics(self) -> BatchStatistics | None:
        """Counts of the last batch's examples and unclipped gradients; None before a step."""
        parts = [norms.statistics()[0] for norms in self._norms]
        return reduce(add, parts) if parts else None

    def virtual_step(self) -> None:
        """Add the last backward pass's clipped gradients to the logical batch, without noise.

        Raises:
            BatchReuseError: the examples are not those of the batch that the engine drew.
            OutsideBatchError: with augmentation_multiplicity, the engine did not draw the batch.
        """
        recorded = self._take()
        if recorded is not None:
            if recorded.views > 1 and not self.feed.part:
                recorded.clear()
                raise OutsideBatchError(
                    "with augmentation_multiplicity, a batch that the engine did not draw needs "
                    "one forward pass on all views of all its examples, those of an example side "
                    "by side; if that exceeds memory, take batches from engine.batches(x, y) with "
                    "max_physical_batch"
                )
            # An interrupted sum is dropped: another try would count its first examples twice.
            batch, self._batch = self._batch, None
            self._batch = self._add(recorded, batch)

    def step(self, update: Callable[[], Any]) -> Any:
        """Set the parameters' gradients to the noisy mean of the batch, and call `update`.

        The noisy mean is the noisy sum of clipped gradients, divided by the expected batch size. If
        the physical batch is not the last of its logical batch, it is only added to the sum.

        Args:
            update: the original `optimizer.step`.

        Returns:
            The result of `update`, or None if it was not called.

        Raises:
            BudgetExhaustedError: all calibrated steps are taken.
            BatchReuseError: the examples are not those of the batch that the engine drew.
            NotPoissonError: batches were declared Poisson samples, but their sizes contradict this.
            OutsideBatchError: a batch that the engine did not draw has no privacy guarantee.
            EpochError: the batch is outside the passes over shuffled data.
        """
        if self.feed.parts_left:
            self.virtual_step()
            return None
        self._refuse_beyond_plan()
        self.feed.check_open()
        last = self._take()
        self.feed.check_used()
        # From here on the batch is closed: an interrupted step does not release it again.
        batch, self._batch = self._batch, None
        examples = (batch.examples if batch else 0) + (last.examples if last else 0)
        number = self.schedule.steps
        for event, count in self.schedule.charges(examples, self.feed.take(), self.mechanism):
            self.ledger.record(event, count)
        self._release(batch, last, number)
        return update()

    def drop(self) -> None:
        """Drop the sum of the unfinished batch, and all gradients that are in no sum yet."""
        self._batch = None
        self._model.discard()

    def use_mechanism(self, mechanism: DpSgdMechanism) -> None:
        """Set the DP-SGD mechanism of the next steps, which differs in its clipping norms only."""
        if mechanism is not self.mechanism:
            self.mechanism, self._made = mechanism, None

    def split_batches(self, most: int | None) -> None:
        """Set the largest physical batch, and drop the sum of the unfinished batch.

        Args:
            most: largest number of examples in a forward pass; None to leave batches whole.
        """
        self.drop()
        self.mechanism = replace(self.mechanism, max_physical_batch=most)
        self.feed.most = most
        self._model.use_padded_batches(self.mechanism.padded_rows)

    def _take(self) -> RecordedPass | None:
        """Return the forward pass of the last backward pass, after counting its examples."""
        recorded = self._model.take()
        if recorded is not None:
            try:
                self.feed.count(recorded.examples, recorded.part, has_views=recorded.views > 1)
            except BatchReuseError:
                recorded.clear()
                raise
            if recorded.losses is None:
                self.losses.note_plain_backward()
        return recorded

    def _release(self, batch: _OpenBatch | None, last: RecordedPass | None, number: int) -> None:
        """Release the noisy sum of the batch and the last pass as the parameters' gradients."""
        noise = self._streams.noise(number)
        used = noise if self.mechanism.noise_multiplier else None

        def use(_: slice, released: Tensor) -> None:
            parameters = self._model.parameters
            views = parameters.views(released[0])
            for parameter, gradient in zip(parameters.tensors, views, strict=True):
                parameter.grad = gradient

        self._norms = self._take_step(batch, last, [used], use)
        is_fixed = self.mechanism.adapted_clip_norm is None
        statistics = None if is_fixed else self.private_statistics
        if statistics is not None:
            self.use_mechanism(self.mechanism.adapt(statistics, noise))

    def _add(self, recorded: RecordedPass, batch: _OpenBatch | None) -> _OpenBatch:
        """Return the sum of a batch with the clipped gradients of a pass added."""
        sums = list[Tensor]()
        norms = self._take_step(batch, recorded, None, lambda _, total: sums.append(total.double()))
        return _OpenBatch(sums[0], norms)

    def _take_step(
        self,
        batch: _OpenBatch | None,
        last: RecordedPass | None,
        noises: Sequence[NoiseSource | None] | None,
        use: Use,
    ) -> Sequence[StepNorms]:
        """Add a pass to the sum of a batch, and return the norms; see `PrivateStep.take`."""
        # A step within autocast would round the sums to its type.
        kind = self._model.parameters.tensors[0].device.type
        is_off = not torch.is_autocast_enabled(kind)
        padded = last.padded_batches if last else ()
        examples, earlier = last.examples if last else 0, {0: batch.total} if batch else {}
        try:
            terms, sums = self._terms_and_sums()
            sums.begin([examples], earlier)
            # New memory, since users may keep the gradients of a step.
            into = sums.new_releases(self._model.parameters.tensors[0].dtype)
            step = PrivateStep(terms, sums, into, noises, use)
            with nullcontext() if is_off else torch.autocast(kind, enabled=False):
                norms = step.take(PaddedRecording.clipped, padded)
        finally:
            if last is not None:
                last.clear()  # frees activations now, not with the user's graph
        return (*batch.norms, norms) if batch else (norms,)

    def _terms_and_sums(self) -> tuple[StepTerms, BatchSums]:
        """Return both for the mechanism, device, products and padded batches as they are now."""
        parameters, rows = self._model.parameters, self._model.padded_examples
        device = parameters.tensors[0].device
        kind = rows, device, products_are_exact(device)
        if self._made is None or self._made[0] != kind:
            terms = StepTerms.of([self.mechanism], parameters, rows)
            sums = BatchSums(parameters, [self.mechanism.rounding], rows, apart=True)
            self._made = kind, terms, sums
        return self._made[1:]

    def _refuse_beyond_plan(self) -> None:
        if (self.schedule.steps + 1) * (self._model.parameters.size + 1) > MAX_DRAWS:
            raise BudgetExhaustedError(
                f"the proof covers {MAX_DRAWS:.0e} values of noise, steps times trained values: "
                "train fewer values, or take fewer steps"
            )
        planned = self._terms.planned_steps
        if planned is not None and self.schedule.steps >= planned:
            raise BudgetExhaustedError(
                f"the noise was calibrated to target_epsilon={self._terms.target_epsilon:g} for "
                f"{planned} steps, and they are taken; one more would exceed it. Make the engine "
                "with more steps or epochs, or with a noise_multiplier"
            )
