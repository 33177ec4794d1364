"""Step of an attached optimizer: lot, charge, noise, update, in this order."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.sampler_slack import MAX_DRAWS
from fedsim.clients.gradients.per_example import LotStatistics
from fedsim.clients.mechanisms.dp_sgd.lot_sums import products_are_exact
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.privacy_engine.attachment import AttachedModel
from fedsim.clients.privacy_engine.loaders import LotFeed, LotReuseError
from fedsim.clients.privacy_engine.lot_schedule import (
    BudgetExhaustedError,
    EngineStreams,
    LotSchedule,
)
from fedsim.clients.privacy_engine.outside_lots import OutsideLotError
from fedsim.clients.privacy_engine.recorded_pass import RecordedPass
from fedsim.clients.privacy_engine.terms import PrivacyTerms
from fedsim.core.errors import FedsimError
from fedsim.noise.release import Scales, release_
from fedsim.protocol.noisy_sums import LearntBound


@dataclass
class _OpenLot:
    """Clipped sum of a lot's physical batches so far, in steps of the grid.

    It is float32 for a lot of one short batch (`SumRounding`), else float64.
    """

    total: Tensor
    statistics: LotStatistics


logger = logging.getLogger(__name__)

_WAYS = (
    "either call engine.check_isolation(loss, x, y) once, now or later, with the same loss and a "
    "few public examples of all kinds of labels; or call engine.backward(losses) in place of "
    "loss.backward(), with one loss for each example (reduction='none')"
)


class UncheckedLossError(FedsimError, RuntimeError):
    """An ε was asked for that would hold for losses of one kind only, which nobody has checked."""


class LossEvidence:
    """Whether all losses so far were given by example, or checked.

    A loss of one value may divide by what depends on all examples (class weights or ignored labels
    under a mean), or by another number than declared. Then one example moves the gradients of all
    others, and backward passes do not show it.
    """

    def __init__(self) -> None:
        self.has_plain_backward = self.is_checked = False

    def note_plain_backward(self) -> None:
        """Note gradients of a `loss.backward()` of the caller's own."""
        if not self.has_plain_backward and not self.is_checked:
            logger.warning(
                "loss.backward() does not show whether the loss keeps examples apart, so "
                "get_epsilon() will refuse; %s",
                _WAYS,
            )
        self.has_plain_backward = True

    def require(self) -> None:
        """Check that every loss is known to keep examples apart.

        Raises:
            UncheckedLossError: a `loss.backward()` is not covered by a check.
        """
        if self.has_plain_backward and not self.is_checked:
            raise UncheckedLossError(
                "no epsilon is known: loss.backward() ran, and whether the loss keeps examples "
                f"apart was not checked; {_WAYS}"
            )

    def state(self) -> dict[str, bool]:
        """Return what to resume from."""
        return {"has_plain_backward": self.has_plain_backward, "is_checked": self.is_checked}

    def restore(self, state: Mapping[str, bool]) -> None:
        """Resume from `state`; a check of this engine stays."""
        self.has_plain_backward = bool(state["has_plain_backward"])
        self.is_checked = self.is_checked or bool(state["is_checked"])


class PrivateSteps:
    """Sums physical batches to lots, and releases each lot once.

    Guarantee: a release is in `ledger` before the optimizer sees it; a lot is released at most
    once, even if the step is interrupted; noise is added once per lot.

    Attributes:
        mechanism: of the next step.
        ledger: all charges.
        feed: feeds the lots of `schedule` to the training loop.
        losses: what is known about the caller's losses.
        private_statistics: counts of the last lot's examples.

    Args:
        model: computes the clipped sums.
        mechanism: bound to the model.
        terms: public terms.
        streams: of lots and noise.
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
        self.schedule = LotSchedule(terms, streams)
        self.feed = LotFeed(self.schedule, terms.max_physical_batch, self.drop)
        self.losses = LossEvidence()
        self.private_statistics: LotStatistics | None = None
        self._model, self._terms, self._streams = model, terms, streams
        self._lot: _OpenLot | None = None
        model.passes.part = lambda: self.feed.part

    @property
    def is_open(self) -> bool:
        """Whether a lot has batches and is not released."""
        return self._lot is not None

    def virtual_step(self) -> None:
        """Add the clipped gradients of the last backward pass to the lot, without noise.

        Raises:
            LotReuseError: its examples are not those of the lot that the engine drew.
            OutsideLotError: views of examples, in a part of a lot that the engine did not draw.
        """
        recorded = self._take()
        if recorded is not None:
            if recorded.views > 1 and not self.feed.part:
                recorded.clear()
                raise OutsideLotError(
                    "with augmentations, a lot from outside is one forward pass on all views of "
                    "all its examples, those of an example side by side; take lots from "
                    "engine.batches(x, y) with max_physical_batch where it exceeds memory"
                )
            lot = self._new_lot(recorded) if self._lot is None else self._lot
            self._add(recorded, lot)
            self._lot = lot

    def step(self, update: Callable[[], Any]) -> Any:
        """Release the lot as the parameters' gradients and call `update`.

        A part of a lot that is not the last one is added, and nothing is released.

        Raises:
            BudgetExhaustedError: all calibrated steps are taken.
            LotReuseError: the examples are not those of the lot that the engine drew.
            NotPoissonError: the lots cannot be the Poisson samples that they are declared.
            OutsideLotError: the account cannot cover a lot that the engine did not draw.
            EpochError: the lot belongs to no pass over shuffled data.
        """
        if self.feed.parts_left:
            self.virtual_step()
            return None
        self._refuse_beyond_plan()
        self.feed.check_open()
        last = self._take()
        self.feed.check_used()
        # From here on the lot is closed: an interrupted step does not release it again.
        lot, self._lot = self._lot, None
        examples = (lot.statistics.examples if lot else 0) + (last.examples if last else 0)
        number = self.schedule.steps
        for event, count in self.schedule.charges(examples, self.feed.take(), self.mechanism):
            self.ledger.record(event, count)
        self._release(lot, last, number)
        return update()

    def drop(self) -> None:
        """Drop the open lot, and the gradients that are in no lot."""
        self._lot = None
        self._model.discard()

    def use_mechanism(self, mechanism: DpSgdMechanism) -> None:
        """Use another mechanism from the next step on."""
        if mechanism is not self.mechanism:
            self.mechanism = mechanism.for_model(self._model.parameters)

    def split_lots(self, most: int | None) -> None:
        """Run lots in parts of at most so many examples from now on; drops an open lot.

        Args:
            most: examples in a forward pass; None: lots are not split.
        """
        self.drop()
        self.mechanism = replace(self.mechanism, max_physical_batch=most)
        self.feed.most = most
        self._model.use_tiles(self.mechanism.tile_rows)

    def clipping_state(self) -> dict[str, LearntBound] | None:
        """Return the state of adaptive clipping; None where the bound is fixed."""
        norm = self.mechanism.clipping.adapted_clip_norm
        return None if norm is None else {"max_grad_norm": norm}

    def clipping_from(self, state: Mapping[str, LearntBound]) -> None:
        """Resume from `clipping_state`."""
        self.use_mechanism(self.mechanism.resume(state["max_grad_norm"]))

    def _take(self) -> RecordedPass | None:
        """Return the last backward pass, counted."""
        recorded = self._model.take()
        if recorded is not None:
            try:
                self.feed.count(recorded.examples, recorded.part, has_views=recorded.views > 1)
            except LotReuseError:
                recorded.clear()
                raise
            if recorded.losses is None:
                self.losses.note_plain_backward()
        return recorded

    def _release(self, lot: _OpenLot | None, last: RecordedPass | None, number: int) -> None:
        """Release the open lot and the last pass as the gradients."""
        parameters, noise = self._model.parameters, self._streams.noise(number)
        lot = lot or self._new_lot(last)
        if last is not None:
            self._add(last, lot)
        released = parameters.tensors[0].new_empty(1, parameters.size)
        used = noise if self.mechanism.noise_multiplier else None
        release_(lot.total.unsqueeze(0), [used], self._lengths(), released)
        views = parameters.views(released[0])
        for parameter, gradient in zip(parameters.tensors, views, strict=True):
            parameter.grad = gradient
        self.private_statistics = lot.statistics
        self.use_mechanism(self.mechanism.adapt(lot.statistics, noise))

    def _lengths(self) -> Scales:
        """Return the length of a step of each group's grid in a release."""
        parameters, mechanism = self._model.parameters, self.mechanism
        groups = mechanism.groups(parameters)
        steps = torch.tensor([mechanism.grid_steps(groups)], dtype=torch.float64)
        lengths = steps.to(parameters.tensors[0].device) / mechanism.expected_lot
        places = parameters.group_slices(groups.members)
        return [(place, lengths[:, group : group + 1]) for place, group in places]

    def _add(self, recorded: RecordedPass, lot: _OpenLot) -> None:
        """Add the clipped gradients of a pass to a lot."""
        groups = self.mechanism.groups(self._model.parameters)
        if lot.statistics.examples:
            lot.total = lot.total.double()
        lot.statistics += self._model.add_clipped_sum(
            recorded,
            self.mechanism.clipping,
            groups,
            lot.total,
            scales=[1.0 / step for step in self.mechanism.grid_steps(groups)],
            divided_by_batch=self._terms.loss_reduction == "mean",
        )

    def _new_lot(self, first: RecordedPass | None) -> _OpenLot:
        parameters = self._model.parameters
        kind, device = parameters.tensors[0].dtype, parameters.tensors[0].device
        if (
            first is None
            or first.examples > min(self.mechanism.rounding.rows, self._model.tile_examples)
            or not products_are_exact(device)
        ):
            kind = torch.float64
        total = torch.zeros(parameters.size, dtype=kind, device=device)
        groups = self.mechanism.groups(parameters)
        return _OpenLot(total, LotStatistics(0, 0, (0,) * len(groups.bounds)))

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
