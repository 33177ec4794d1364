"""Per-example gradients of a user's own `loss.backward()`, from recorded forward passes.

While attached, `model(x)` with gradients enabled runs under a `Tape`. The user's backward pass then
fills the tape's uses, and no parameter gets a `.grad`. A gradient that reaches a parameter in any
other way (a submodule called on its own, a penalty on weights in the loss) would not be clipped, so
the backward pass refuses it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.clipping import Clipping, Groups
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.clip_factors import LotStatistics
from fedsim.clients.dp_sgd.per_example.interface import UncoveredParameterError
from fedsim.clients.dp_sgd.per_example.layers import ExampleUse
from fedsim.clients.dp_sgd.per_example.module_use import Unit, units_in_place
from fedsim.clients.dp_sgd.per_example.rule_gradients import RuleGradients
from fedsim.clients.privacy_engine.forward_checks import check_forward, leading_tensor
from fedsim.clients.privacy_engine.pass_tape import BackwardError, PassTape


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

    Args:
        model: its parameters that are trainable now are trained.

    Raises:
        ValueError: nothing is trainable, or parameters differ in type or device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = InPlaceParameters(model)
        self._gradients = _TapeGradients(model, _no_loss, parameters=self.parameters)
        self._pending: list[PassTape] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._forward: _RecordingForward | None = None
        self._units: Sequence[Unit] | None = None  # None: the model is not checked yet

    def attach(self) -> None:
        """Record forward passes from now on.

        Raises:
            ValueError: the model is attached already.
        """
        if isinstance(self.model.__dict__.get("forward"), _RecordingForward):
            raise ValueError("the model is attached to a privacy engine already; detach that first")
        self._forward = _RecordingForward(self.model, self._record)
        self.model.forward = self._forward
        for name, parameter in zip(self.parameters.names, self.parameters.tensors, strict=True):
            hook = _refuse_gradient(name)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Restore the model, and drop gradients that are in no lot."""
        if self._forward is not None:
            self._forward.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._forward = None
        self.discard()

    def discard(self) -> None:
        """Drop the gradients of backward passes that are in no lot."""
        for tape in self._pending:
            tape.clear()
        self._pending.clear()

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, public: bool) -> None:
        """Check the model with the arguments of a call (see `check_forward`)."""
        with self.paused():
            self._units = check_forward(self.model, args, kwargs, public=public)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model without recording."""
        if self._forward is not None:
            self._forward.pause(True)
        try:
            yield
        finally:
            if self._forward is not None:
                self._forward.pause(False)

    def add_clipped_sum(
        self,
        clipping: Clipping,
        groups: Groups,
        into: Tensor,
        *,
        scale: float,
        divided_by_batch: bool,
    ) -> LotStatistics | None:
        """Add scale · Σ_i clip(gradient_i) of the last backward pass to the flat tensor `into`.

        Args:
            clipping: the bounds.
            groups: the groups of `parameters`.
            into: (size,).
            scale: of the sum.
            divided_by_batch: whether the loss is a mean over the n examples of the forward pass;
                gradients are then multiplied by n, so that C bounds one example's own gradient.

        Returns:
            Counts of the examples; None if there was no backward pass.

        Raises:
            BackwardError: the gradients cannot be attributed to examples.
        """
        tape = self._take()
        if tape is None:
            return None
        try:
            uses = tape.gradients(tape.examples if divided_by_batch else 1)
            return self._gradients.add(uses, tape.examples, clipping, groups, into, scale)
        finally:
            tape.clear()  # frees activations now, not with the user's graph

    def new_sum(self) -> Tensor:
        """Return a flat tensor of zeros (size,) on the parameters' device."""
        like = self.parameters.tensors[0]
        return torch.zeros(self.parameters.size, dtype=like.dtype, device=like.device)

    def _take(self) -> PassTape | None:
        if len(self._pending) > 1:
            sizes = " and ".join(str(tape.examples) for tape in self._pending)
            raise BackwardError(
                f"gradients reached {len(self._pending)} forward passes ({sizes} examples) before "
                "they were taken, so it is not known which of them belong to one example. Make one "
                "forward pass (torch.cat of the inputs) for each backward pass, and call "
                "optimizer.virtual_step() after each backward pass that is not followed by "
                "optimizer.step(); optimizer.zero_grad() drops gradients that are not wanted"
            )
        if not self._pending:
            return None
        tape = self._pending.pop()
        if tape.ran_twice:
            tape.clear()
            raise BackwardError(
                "backward ran twice through one forward pass (retain_graph), so gradients would be "
                "counted twice; add the losses up and call backward once"
            )
        tape.taken = True
        return tape

    def _record(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        first = leading_tensor(args, kwargs)
        if self._units is None:
            self.check(args, kwargs, public=False)
        tape = PassTape(self.parameters.index, len(first), self._pending)
        with units_in_place(self._units or (), len(first), self.parameters) as units:
            tape.units = units
            with tape:
                outputs = forward(*args, **kwargs)
        if tape.uncovered:
            raise UncoveredParameterError(self._uncovered(tape.uncovered), tuple(tape.uncovered))
        tape.watch_units()
        return outputs

    def _uncovered(self, indices: set[int]) -> str:
        names = [self.parameters.names[index] for index in sorted(indices)]
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        return (
            f"no per-example gradients for {shown}: the parameter is used in another way than when "
            "the model was checked, or on an input whose first dimension is not the examples"
        )


class _TapeGradients(RuleGradients):
    """Book-keeping on forward and backward passes that the user ran."""

    def add(
        self,
        uses: Sequence[ExampleUse],
        examples: int,
        clipping: Clipping,
        groups: Groups,
        into: Tensor,
        scale: float,
    ) -> LotStatistics:
        """Add scale · Σ_i clip(gradient_i) of the filled uses to `into` (size,)."""
        self._uses = uses
        rows = torch.empty(examples, 0)
        try:
            return self.add_clipped_sum(rows, rows, clipping, groups, into, scale=scale)
        finally:
            self._uses = ()

    def record(self, features: Tensor, targets: Tensor) -> Sequence[ExampleUse]:
        """Return the uses that the user's backward pass has filled."""
        return self._uses


class _RecordingForward:
    """The `forward` of an attached model."""

    def __init__(
        self,
        model: nn.Module,
        record: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self._model, self._record = model, record
        self._had_own = "forward" in model.__dict__
        self._original: Callable[..., Any] = model.forward
        self._active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._active and torch.is_grad_enabled()):
            return self._original(*args, **kwargs)
        return self._record(self._original, args, kwargs)

    def pause(self, paused: bool) -> None:
        """Call the original `forward` while paused."""
        self._active = not paused

    def restore(self) -> None:
        """Put the model's own `forward` back."""
        self._active = False
        if self._model.__dict__.get("forward") is not self:
            return  # patched since by other code, which calls the original through this object
        if self._had_own:
            self._model.forward = self._original
        else:
            del self._model.forward

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle of an attached model is a plain model with its own forward.
        return getattr, (self._model, "forward")


def _refuse_gradient(name: str) -> Callable[[Tensor], None]:
    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise BackwardError(
            f"parameter {name!r} got a gradient outside the recorded forward pass, so it is not "
            "clipped. Call the attached model itself (not a submodule or a compiled copy) to "
            "compute outputs, keep penalties on weights out of the loss (use the optimizer's "
            "weight_decay), and make a forward pass after attach"
        )

    return refuse


def _no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise RuntimeError("an attached model's loss is its user's")
