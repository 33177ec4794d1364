"""Per-example gradients of a user's own `loss.backward()`, from recorded forward passes.

While attached, `model(x)` with gradients enabled runs by the layer rules and is recorded. The
user's backward pass then fills the recorded uses in, and no parameter gets a `.grad`. A gradient
that reaches a parameter in any other way (a submodule called on its own, a penalty on weights in
the loss) would not be clipped, so the backward pass refuses it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedsim.clients.clipping.clipping import Clipping, Groups
from fedsim.clients.gradients.layers.base import Part
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import (
    ClipBounds,
    LotStatistics,
    by_example,
    clipped_rows,
    lot_statistics,
)
from fedsim.clients.gradients.recording import RuledModel
from fedsim.clients.gradients.rule_gradients import by_parameter
from fedsim.clients.gradients.sequence import ModuleSequence
from fedsim.clients.model_checks.safety import UnsafeModelError, check_parameter_types
from fedsim.clients.privacy_engine.forward_checks import (
    Layout,
    call_in_tiles,
    check_forward,
    join_outputs,
    leading_tensor,
)
from fedsim.clients.privacy_engine.opacus_names import NoGradSample
from fedsim.clients.privacy_engine.recorded_pass import (
    BackwardError,
    PassContext,
    RecordedPass,
    RecordingForward,
    refuse_gradient,
)
from fedsim.clients.privacy_engine.row_losses import ForwardPass, with_origin, without_origin


class InPlaceParameters(FlatParameters):
    """A model's trainable parameters, left in their memory; only their gradient is flat."""

    def __init__(self, model: nn.Module) -> None:
        before = {parameter: parameter.data for parameter in model.parameters()}
        super().__init__(model)
        for parameter, data in before.items():
            parameter.data = data
        self._size = self.data.numel()
        del self.data  # a copy, which must not be taken for the parameters' values

    @property
    def size(self) -> int:
        """Number of trainable values."""
        return self._size


class AttachedModel:
    """A model in its user's own training loop, with per-example gradients.

    The model runs in tiles of a public number of rows, so that the last bits of an example's
    contribution do not depend on how many others are in the lot (see
    `fedsim.clients.gradients.tiles`).

    Args:
        model: its parameters that are trainable now are trained.
        views: K, the rows of each example in a forward pass, side by side.

    Attributes:
        passes: what the forward passes share.
        tile_examples: R, the public number of examples in a tile.

    Raises:
        ValueError: nothing is trainable, parameters differ in type or device, or their type is
            shorter than float32.
    """

    def __init__(self, model: nn.Module, views: int = 1) -> None:
        self.model, self.views = model, views
        self.passes = PassContext([])
        self.tile_examples = 1
        self.parameters = InPlaceParameters(model)
        check_parameter_types(zip(self.parameters.names, self.parameters.tensors, strict=True))
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._forward: RecordingForward | None = None
        self._checked: _CheckedModel | None = None

    def attach(self) -> None:
        """Record forward passes from now on.

        Raises:
            ValueError: the model is attached already.
        """
        if isinstance(vars(self.model).get("forward"), RecordingForward):
            raise ValueError("the model is attached to a privacy engine already; detach that first")
        self._forward = RecordingForward(self.model, self._record)
        self._forward.install()
        for name, parameter in zip(self.parameters.names, self.parameters.tensors, strict=True):
            hook = refuse_gradient(name)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            vars(parameter)["grad_sample"] = NoGradSample()

    def detach(self) -> None:
        """Restore the model, and drop gradients that are in no lot."""
        if self._forward is not None:
            self._forward.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self.parameters.tensors:
            vars(parameter).pop("grad_sample", None)
        self._forward = None
        self.discard()

    def discard(self) -> None:
        """Drop the gradients of backward passes that are in no lot."""
        for recorded in self.passes.pending:
            recorded.clear()
        self.passes.pending.clear()

    def backward(self, losses: Tensor) -> None:
        """Run backward through losses (n,), one of each example or of each row.

        Raises:
            ValueError: the losses are not a vector.
            UnsafeModelError: a loss depends on the outputs of another example (the first calls are
                checked).
        """
        if losses.ndim != 1:
            raise ValueError(
                "engine.backward takes one loss for each example (n,), as with reduction='none', "
                f"got shape {tuple(losses.shape)}; take the mean of each example's own values"
            )
        losses, passes = without_origin(losses), self.passes
        if passes.outputs and passes.checks_left:
            check_own_rows(losses, passes.outputs)
            passes.checks_left -= len(losses) > 1
        passes.losses = len(losses)
        try:
            losses.sum().backward()
        finally:
            passes.losses = None

    def check(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, public: bool
    ) -> "_CheckedModel":
        """Check the model with the arguments of a call (see `check_forward`)."""
        with self.paused():
            units, self.tile_examples = check_forward(
                self.model,
                args,
                kwargs,
                tile_examples=self.tile_examples,
                views=self.views,
                public=public,
            )
            self._checked = _CheckedModel(RuledModel(self.model, self.parameters, units))
        return self._checked

    def use_tiles(self, examples: int) -> None:
        """Run in tiles of so many examples from now on; the model is checked with them first."""
        self.tile_examples, self._checked = examples, None

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the model is as it is when it is not attached."""
        return nullcontext() if self._forward is None else self._forward.removed()

    def take(self) -> RecordedPass | None:
        """Return the pass that the last backward pass went through; None if there was none.

        Raises:
            BackwardError: the gradients cannot be attributed to examples.
            UnsafeModelError: a buffer of the model has changed since the model was checked.
        """
        if self._checked is not None:
            self._checked.refuse_changed_buffers()
        pending = self.passes.pending
        if len(pending) > 1:
            sizes = " and ".join(str(recorded.examples) for recorded in pending)
            raise BackwardError(
                f"gradients reached {len(pending)} forward passes ({sizes} examples) before "
                "they were taken, so it is not known which of them belong to one example. Make one "
                "forward pass (torch.cat of the inputs) for each backward pass, and call "
                "optimizer.virtual_step() after each backward pass that is not followed by "
                "optimizer.step(); optimizer.zero_grad() drops gradients that are not wanted"
            )
        if not pending:
            return None
        self.passes.outputs.clear()
        recorded = pending.pop()
        recorded.take()
        return recorded

    def add_clipped_sum(
        self,
        recorded: RecordedPass,
        clipping: Clipping,
        groups: Groups,
        into: Tensor,
        *,
        scales: Sequence[float],
        divided_by_batch: bool,
    ) -> LotStatistics:
        """Add scale_m · Σ_i clip(gradient_i) of a taken pass to `into`, and drop its gradients.

        Args:
            recorded: n examples.
            clipping: the bounds.
            groups: the groups of `parameters`.
            into: flat tensor (size,), float64, or float32 for a lot that may be summed in it.
            scales: of the sum, for each group.
            divided_by_batch: whether the loss is a mean over the n examples of the forward pass;
                gradients are then n times what was recorded, so that C bounds one example's own.

        Returns:
            Counts of the examples.
        """
        views = self.parameters.stacked_views(into.unsqueeze(0))
        times = recorded.gradient_factor(is_mean=divided_by_batch)
        sizes = _sizes(recorded.examples, self.tile_examples)
        statistics = LotStatistics(0, 0, (0,) * len(groups.bounds))
        # A step within autocast would round the sums to its type.
        off = torch.autocast(into.device.type, enabled=False)
        try:
            for tile, examples in zip(recorded.tiles, sizes, strict=True):
                n = tile.rows // self.views
                rows = torch.zeros(n, len(scales), dtype=torch.float64, device=into.device)
                rows[:examples] = rows.new_tensor(list(scales))
                clip = ClipBounds.of_client(clipping, groups, rows)
                found = by_example(by_parameter(tile.uses), self.views)
                with off if _is_autocast(into) else nullcontext():
                    clipped = clipped_rows(found, clip, times=times)
                    clipped.add_to(views, Part(rows=slice(0, examples)))
                statistics += lot_statistics(clip, clipped.norms, clipped.dropped)
        finally:
            recorded.clear()  # frees activations now, not with the user's graph
        return statistics

    def _record(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        first = leading_tensor(args, kwargs)
        n = len(first)
        if n % self.views:
            raise BackwardError(
                f"the model got {n} rows, and augmentations={self.views} means {self.views} rows "
                "for each example, side by side, as x.repeat_interleave(K, 0) makes them"
            )
        checked = self._checked
        if checked is None or not checked.is_current():
            checked = self.check(args, kwargs, public=False)
        ruled, sequence = checked.ruled, checked.sequence
        rows = self.tile_examples * self.views
        origin = ForwardPass(n, self.backward)
        if not n:
            return with_origin(_without_examples(forward, args, kwargs), origin)
        recorded = RecordedPass(self.parameters, n // self.views, self.views, self.passes)
        tiles = [recorded.start_tile(rows) for _ in range(0, n, rows)]
        by_hand = len(args) == 1 and not kwargs and first is args[0] and sequence.is_usable
        if by_hand and not first.requires_grad and not _is_autocast(first):
            return self._noted(sequence.record(tiles, first), origin)
        found = []
        calls = call_in_tiles(args, kwargs, n, rows, checked.layout)
        for tile, (own, named) in zip(tiles, calls, strict=True):
            with ruled.in_place(tile):
                run = self.model.forward if ruled.covers_root else forward
                found.append(run(*own, **named))
        return self._noted(join_outputs(found, n, rows), origin)

    def _noted(self, outputs: Any, origin: ForwardPass) -> Any:
        """Keep the outputs for a check of the losses, while there is one to come.

        Returns:
            The outputs, which remember their forward pass.
        """
        if self.passes.checks_left:
            leaves = pytree.tree_leaves(outputs)
            self.passes.outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return with_origin(outputs, origin)


class _CheckedModel:
    """A model as it was when it was checked.

    Attributes:
        ruled: the model and its rules.
        sequence: the model as a sequence of modules.
        layout: which arguments of its calls have rows.
    """

    def __init__(self, ruled: RuledModel) -> None:
        self.ruled, self.sequence, self.layout = ruled, ModuleSequence(ruled), Layout()
        self._structure = _structure(ruled.model)
        # By module: the name, its buffers by name, and copies of their values.
        self._buffers = [
            (prefix, own, {name: None if b is None else b.clone() for name, b in own.items()})
            for prefix, own in _buffers(ruled.model)
        ]

    def is_current(self) -> bool:
        """Whether the model has the same modules, with the same hooks, as when it was checked."""
        return self._structure == _structure(self.ruled.model)

    def refuse_changed_buffers(self) -> None:
        """Check that the model's buffers are what they were.

        Raises:
            UnsafeModelError: names one that is not.
        """
        for prefix, own, before in self._buffers:
            if not own and not before:
                continue
            for name in {**own, **before}:
                one, other = before.get(name), own.get(name)
                if one is other or (one is not None and other is not None and one.equal(other)):
                    continue
                raise UnsafeModelError(
                    f"buffer {f'{prefix}.{name}'.lstrip('.')!r} has changed since the model was "
                    "checked, so private examples may be in it without noise; make it a constant, "
                    "or remove the layer that updates it. If your own code set it to a public "
                    "value, call engine.check_model(inputs) with a few public examples"
                )


def _buffers(model: nn.Module) -> list[tuple[str, dict[str, Tensor | None]]]:
    """Return the name and the buffers of each module."""
    return [(name, vars(module)["_buffers"]) for name, module in model.named_modules()]


def _structure(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return a model's modules, with what runs instead of or beside their own forward."""
    found = []
    for module in model.modules():
        own = vars(module)
        hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        forward = None if module is model else own.get("forward")
        found.append((module, forward, hooks))
    return found


def _sizes(examples: int, most: int) -> list[int]:
    """Return the number of examples in each tile."""
    return [min(most, examples - start) for start in range(0, examples, most)]


def _is_autocast(like: Tensor) -> bool:
    return torch.is_autocast_enabled(like.device.type)


def _without_examples(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the outputs for an empty lot, from which a backward pass reaches no parameter."""
    with torch.no_grad():
        outputs = forward(*args, **kwargs)
    leaf = torch.zeros((), requires_grad=True)
    return pytree.tree_map_only(
        Tensor, lambda value: value + leaf if value.is_floating_point() else value, outputs
    )


def check_own_rows(losses: Tensor, outputs: Sequence[Tensor]) -> None:
    """Refuse losses (n,) that reach the outputs of other examples.

    Where loss i depends on the rows of example i alone, the gradient of Σ w_i loss_i at these rows
    is w_i times that of Σ loss_i, for any weights w. Two backward passes to the outputs compare the
    two for random weights. A dependence that has no gradient is not found.

    Args:
        losses: of n examples.
        outputs: of the model, n rows or n times the same number of rows.

    Raises:
        UnsafeModelError: a loss depends on the outputs of another example.
    """
    n = len(losses)
    found = [value for value in outputs if value.requires_grad and n and not len(value) % n]
    if n < 2 or not found:
        return
    generator = torch.Generator().manual_seed(n)
    weights = (torch.rand(n, generator=generator) + 0.5).to(losses)
    plain, weighted = (
        torch.autograd.grad(losses, found, w, retain_graph=True, materialize_grads=True)
        for w in (torch.ones_like(losses), weights)
    )
    for one, other in zip(plain, weighted, strict=True):
        rows = weights.repeat_interleave(len(one) // n).view(-1, *[1] * (one.ndim - 1)).to(one)
        off, size = (other - rows * one).flatten(), (rows * one).flatten()
        finite = off.isfinite() & size.isfinite()
        eps = torch.finfo(one.dtype).eps
        if float(off[finite].norm()) > eps**0.6 * float(size[finite].norm()):
            raise UnsafeModelError(
                "the loss of an example depends on the outputs of other examples, as in a "
                "contrastive loss or one that is divided by a sum over the lot; compute each "
                "example's loss from its own outputs"
            )
