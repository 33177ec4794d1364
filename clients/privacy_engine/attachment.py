"""Per-example gradients in a user's training loop, from recorded forward passes.

While a model is attached, calls of `model(x)` with gradients enabled are recorded. Rules for each
layer type then give per-example gradients in the backward pass of the training loop, and no
parameter gets a `.grad`. A gradient that reaches a parameter in any other way would not be clipped,
so it raises an error. Causes are a call of a submodule alone, or a penalty on weights.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedsim.clients.gradients.parameters import FlatParameters, modules_of
from fedsim.clients.gradients.recording import RuledModel
from fedsim.clients.gradients.rule_gradients import ModuleSequence
from fedsim.clients.model_checks.safety import UnsafeModelError, check_parameter_types
from fedsim.clients.privacy_engine.forward_checks import (
    Layout,
    call_in_padded_batches,
    check_forward,
    join_outputs,
    leading_tensor,
    values_in_place,
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
from fedsim.core.formatting import dtype_text


class InPlaceParameters(FlatParameters):
    """Layout of the gradient of all trainable parameters of a model, as one flat tensor.

    The parameters themselves keep their own memory.
    """

    def __init__(self, model: nn.Module) -> None:
        with values_in_place(model):
            super().__init__(model)
        del self.data  # a copy, which must not be taken for the parameters' values


class AttachedModel:
    """Model in a user's training loop that computes per-example gradients.

    The model runs on batches that are padded to a public number of rows. So not even the last bits
    of an example's contribution depend on how many others are in the batch
    (`fedsim.clients.gradients.padded_batches`).

    Args:
        model: the model; the parameters that are now trainable are trained.
        views: number K of successive rows that each example has in a forward pass.
        is_mean: whether the training loop's loss is a mean over the rows, else a sum.

    Attributes:
        passes: the state that all forward passes share.
        padded_examples: public number of examples in a padded batch.

    Raises:
        ValueError: nothing is trainable, parameters differ in dtype or device, or their dtype has
            less precision than float32.
    """

    def __init__(self, model: nn.Module, views: int, *, is_mean: bool) -> None:
        self.model, self.views = model, views
        self.padded_examples = 1
        self.parameters = InPlaceParameters(model)
        self.passes = PassContext(self.parameters, views, is_mean)
        check_parameter_types(zip(self.parameters.names, self.parameters.tensors, strict=True))
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._forward: RecordingForward | None = None
        self._checked: _CheckedModel | None = None

    def attach(self) -> None:
        """Start to record the model's forward passes.

        Raises:
            ValueError: the model is attached to an engine already.
        """
        if isinstance(vars(self.model).get("forward"), RecordingForward):
            raise ValueError("the model is attached to a privacy engine already; detach that first")
        self._forward = RecordingForward(self.model, self._record)
        for name, parameter in zip(self.parameters.names, self.parameters.tensors, strict=True):
            hook = refuse_gradient(name)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            vars(parameter)["grad_sample"] = NoGradSample()

    def detach(self) -> None:
        """Restore the model's own `forward`, and drop gradients that were not clipped and added."""
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
        """Drop the gradients of backward passes that are not yet clipped and added to a sum."""
        for recorded in self.passes.pending:
            recorded.clear()
        self.passes.pending.clear()

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass through one loss for each example.

        Args:
            losses: one loss for each example (n,); with several views, also one for each row.

        Raises:
            ValueError: the losses are not a vector of real numbers.
            UnsafeModelError: a loss depends on another example's outputs (checked in the first
                calls).
        """
        losses, passes = without_origin(losses), self.passes
        if losses.ndim != 1 or losses.is_complex():
            raise ValueError(
                "engine.backward takes one loss for each example (n,), as with reduction='none', "
                f"got {dtype_text(losses.dtype)} of shape {tuple(losses.shape)}; take the mean of "
                "each example's own values"
            )
        if passes.outputs and passes.checks_left:
            check_own_rows(losses, passes.outputs)
            passes.checks_left -= len(losses) > 1
        passes.losses = len(losses)
        try:
            torch.autograd.backward(losses, torch.ones_like(losses))
        finally:
            passes.losses = None

    def check(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, public: bool
    ) -> "_CheckedModel":
        """Check that the model does not mix examples, and return it prepared for recording.

        Args:
            args: positional arguments of a call of the model.
            kwargs: keyword arguments of the call.
            public: whether the arguments' values are public; if not, only shapes are used.
        """
        with self.paused():
            units, self.padded_examples = check_forward(
                self.model,
                args,
                kwargs,
                padded_examples=self.padded_examples,
                views=self.views,
                public=public,
            )
            self._checked = _CheckedModel(RuledModel(self.model, self.parameters, units))
        return self._checked

    def use_padded_batches(self, examples: int) -> None:
        """Set the number of examples in a padded batch; the next forward pass checks the model."""
        self.padded_examples, self._checked = examples, None

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the model runs as if it were not attached."""
        return nullcontext() if self._forward is None else self._forward.removed()

    def take(self) -> RecordedPass | None:
        """Return the record of the forward pass through which gradients came; None without any.

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

    def _record(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        first = leading_tensor(args, kwargs)
        n = len(first)
        if n % self.views:
            raise BackwardError(
                f"the model got {n} rows, and augmentation_multiplicity={self.views} means "
                f"{self.views} rows "
                "for each example, side by side, as x.repeat_interleave(K, 0) makes them"
            )
        checked = self._checked
        if checked is None or not checked.is_current():
            checked = self.check(args, kwargs, public=False)
        ruled, sequence = checked.ruled, checked.sequence
        rows = self.padded_examples * self.views
        origin = ForwardPass(n, self.backward)
        if not n:
            return with_origin(_without_examples(forward, args, kwargs), origin)
        padded_batches = RecordedPass(self.passes, n // self.views, rows).padded_batches
        by_hand = len(args) == 1 and not kwargs and first is args[0] and sequence.is_usable
        is_plain = not first.requires_grad and not torch.is_autocast_enabled(first.device.type)
        if by_hand and is_plain:
            return self._noted(sequence.record(padded_batches, first), origin)
        outputs = []
        calls = call_in_padded_batches(args, kwargs, n, rows, checked.layout)
        for padded, (positional, named) in zip(padded_batches, calls, strict=True):
            with ruled.in_place(padded):
                run = self.model.forward if ruled.covers_root else forward
                outputs.append(run(*positional, **named))
        return self._noted(join_outputs(outputs, n, rows), origin)

    def _noted(self, outputs: Any, origin: ForwardPass) -> Any:
        """Return the outputs with their forward pass attached, kept if losses are to be checked."""
        if self.passes.checks_left:
            leaves = pytree.tree_leaves(outputs)
            self.passes.outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return with_origin(outputs, origin)


class _CheckedModel:
    """A model with the structure and the buffers that it had when it was checked.

    Attributes:
        ruled: the model with its layer rules.
        sequence: the model as a sequence of modules, if it is one.
        layout: which tensors among the arguments of its calls have a row for each example.
    """

    def __init__(self, ruled: RuledModel) -> None:
        self.ruled, self.sequence, self.layout = ruled, ModuleSequence(ruled), Layout()
        self._structure = _structure(ruled.model)
        # For each module its name, its buffers by name, and copies of their values.
        self._buffers = [
            (prefix, now, {name: None if b is None else b.clone() for name, b in now.items()})
            for prefix, now in _buffers(ruled.model)
        ]

    def is_current(self) -> bool:
        """Whether the model still has the modules and hooks that it had when it was checked."""
        return self._structure == _structure(self.ruled.model)

    def refuse_changed_buffers(self) -> None:
        """Check that the model's buffers still have the values that they had.

        Raises:
            UnsafeModelError: a buffer has changed; the message names it.
        """
        for prefix, now, before in self._buffers:
            if not now and not before:
                continue
            for name in {**now, **before}:
                old, new = before.get(name), now.get(name)
                if old is new or (old is not None and new is not None and old.equal(new)):
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
    """Return each module of a model with its hooks and, if replaced, its `forward`."""
    structure = []
    for module in modules_of(model):
        attributes = vars(module)
        hooks = (*attributes["_forward_hooks"].values(), *attributes["_forward_pre_hooks"].values())
        forward = None if module is model else attributes.get("forward")
        structure.append((module, forward, hooks))
    return structure


def _without_examples(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the outputs for an empty batch, from which a backward pass reaches no parameter."""
    with torch.no_grad():
        outputs = forward(*args, **kwargs)
    leaf = torch.zeros((), requires_grad=True)
    return pytree.tree_map_only(
        Tensor, lambda value: value + leaf if value.is_floating_point() else value, outputs
    )


def check_own_rows(losses: Tensor, outputs: Sequence[Tensor]) -> None:
    """Check that each loss depends on the outputs of one example only.

    If so, the gradient of Σ w_i loss_i at the rows of example i is w_i times the gradient of Σ
    loss_i, for any weights w. Two backward passes to the outputs test this for random weights. A
    dependence without a gradient is not detected.

    Args:
        losses: losses of n examples (n,).
        outputs: output tensors of the model, each with n rows or a multiple of n.

    Raises:
        UnsafeModelError: a loss depends on the outputs of another example.
    """
    n = len(losses)
    by_rows = [value for value in outputs if value.requires_grad and n and not len(value) % n]
    if n < 2 or not by_rows:
        return
    generator = torch.Generator().manual_seed(n)
    weights = (torch.rand(n, generator=generator) + 0.5).to(losses)
    plain, weighted = (
        torch.autograd.grad(losses, by_rows, w, retain_graph=True, materialize_grads=True)
        for w in (torch.ones_like(losses), weights)
    )
    for grad, other in zip(plain, weighted, strict=True):
        rows = weights.repeat_interleave(len(grad) // n).view(-1, *[1] * (grad.ndim - 1)).to(grad)
        off, size = (other - rows * grad).flatten(), (rows * grad).flatten()
        finite = off.isfinite() & size.isfinite()
        eps = torch.finfo(grad.dtype).eps
        if float(off[finite].norm()) > eps**0.6 * float(size[finite].norm()):
            raise UnsafeModelError(
                "the loss of an example depends on the outputs of other examples, as in a "
                "contrastive loss or one that is divided by a sum over the batch; compute each "
                "example's loss from its own outputs"
            )
