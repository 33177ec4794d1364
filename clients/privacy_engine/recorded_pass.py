"""Record of a forward pass of an attached model, and of the gradients of its backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.clients.gradients.layers.base import ExampleUse
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import ClipBounds, ClippedRows, by_example, clipped_rows
from fedsim.clients.gradients.recording import Recording
from fedsim.clients.gradients.rule_gradients import by_parameter
from fedsim.clients.privacy_engine.optimizer_patch import restore_method
from fedsim.core.errors import FedsimError


class BackwardError(FedsimError, RuntimeError):
    """Error if the gradients of a backward pass cannot be attributed to single examples."""


@dataclass
class PassContext:
    """State that all forward passes of an attached model share.

    Attributes:
        parameters: the model's trainable parameters.
        views: number K of successive rows of each example.
        is_mean: whether the training loop's loss is a mean over the rows, else a sum.
        pending: forward passes that a backward pass has reached, but that no batch has used yet.
        part: function that returns the number of the training loop's current physical batch.
        losses: number of losses in the current call of `engine.backward`; None outside a call.
        outputs: output tensors of the last forward pass, kept until the losses are checked.
        checks_left: how many further calls of `engine.backward` are checked.
    """

    parameters: FlatParameters
    views: int
    is_mean: bool
    pending: "list[RecordedPass]" = field(default_factory=list["RecordedPass"])
    part: Callable[[], int] = lambda: 0
    losses: int | None = None
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    checks_left: int = 3
    _values: tuple[object, list[Tensor]] | None = None
    _steps: Tensor | None = None  # ones, then as many zeros

    def values(self) -> list[Tensor]:
        """Return the memory of each parameter with a leading dimension of one client (1, *shape).

        The views are kept as long as the parameters keep their memory.
        """
        tensors = self.parameters.tensors
        memory = [(p.data_ptr(), p.shape, p.stride(), p.dtype) for p in tensors]
        if self._values is None or self._values[0] != memory:
            self._values = memory, [tensor.detach().unsqueeze(0) for tensor in tensors]
        return self._values[1]

    def weights(self, used: int, rows: int) -> Tensor:
        """Return weights of a padded batch (rows,): 1 for the first `used` rows, 0 for the rest."""
        like, steps = self.parameters.tensors[0], self._steps
        if steps is None or steps.shape[0] != 2 * rows or steps.dtype != like.dtype:
            steps = torch.cat([like.new_ones(rows), like.new_zeros(rows)])
        steps = self._steps = steps.to(like.device)
        return steps[rows - used : 2 * rows - used]


class RecordedPass:
    """Record of one forward pass of an attached model, which runs in padded batches.

    When a backward pass reaches the record, the record is appended to `context.pending`. A forward
    pass without a backward pass leaves nothing behind.

    Args:
        context: the state that the model's forward passes share.
        examples: n, number of examples.
        rows: number of rows of a padded batch.

    Attributes:
        examples: n, number of examples.
        views: number K of rows of each example.
        padded_batches: the recordings of the padded batches, in the order of their examples.
        part: number of the training loop's physical batch at the time of the forward pass.
        losses: number of losses given to `engine.backward`; None if the training loop called
            `loss.backward()`.
        context: the state that the model's forward passes share.
    """

    def __init__(self, context: PassContext, examples: int, rows: int) -> None:
        self.examples, self.views, self.part = examples, context.views, context.part()
        self.losses: int | None = None
        self.context, self._taken = context, False
        self._ways = set[int | None]()  # `losses` of the context at each backward pass
        height = rows // self.views
        self.padded_batches = [
            PaddedRecording(self, rows, min(examples - start, height))
            for start in range(0, examples, height)
        ]

    def note(self) -> None:
        """Note that a backward pass has reached this forward pass.

        Raises:
            BackwardError: a batch has already used the gradients of this forward pass.
        """
        if self._taken:
            raise BackwardError(
                "backward ran again through a forward pass whose gradients are in the batch's sum "
                "already (retain_graph); its examples would count twice. Add the losses up and "
                "call backward once, or make a new forward pass after optimizer.step()"
            )
        self._ways.add(self.context.losses)
        if not any(other is self for other in self.context.pending):
            self.context.pending.append(self)

    def take(self) -> None:
        """Check the gradients of the forward pass, and note that a batch now uses them.

        Raises:
            BackwardError: two backward passes went through one call of a layer, or the number of
                losses is not the number of examples or rows, or losses of two kinds were used.
        """
        uses = [use for padded in self.padded_batches for use in padded.uses]
        if len({id(use) for use in uses}) < len(uses):
            self.clear()
            raise BackwardError(
                "backward ran twice through one forward pass (retain_graph), so gradients would be "
                "counted twice; add the losses up and call backward once"
            )
        ways = set(self._ways)
        self.losses = next(iter(ways))
        if len(ways) > 1 or self.losses not in (None, self.examples, self.examples * self.views):
            self.clear()
            raise BackwardError(
                f"a forward pass of {self.examples} examples got gradients of losses of several "
                f"kinds or another number ({', '.join(map(str, ways))}); call "
                "engine.backward(losses) once, with one loss for each example"
            )
        self._taken = True

    @property
    def gradient_factor(self) -> float:
        """Factor that turns recorded gradients into per-example gradients.

        A per-example gradient is the mean over the example's views. `engine.backward` does not
        divide losses by the number of examples, so the factor does not depend on this number then.
        """
        if self.losses is None and self.context.is_mean:
            return float(self.examples)
        return 1.0 if self.losses == self.examples else 1.0 / self.views

    def clear(self) -> None:
        """Drop the recorded gradients and activations."""
        self._ways.clear()
        for padded in self.padded_batches:
            if self._taken:  # the training loop may still hold the autograd graph
                for use in padded.uses:
                    use.forget()
            padded.uses.clear()
        if self._taken:
            self.padded_batches.clear()  # no cycle of references keeps memory


class PaddedRecording(Recording):
    """Record of the layer calls in one padded batch of a forward pass.

    Args:
        whole: the record of the forward pass to which the padded batch belongs.
        rows: number of rows of the padded batch.
        examples: number of examples in the padded batch.
    """

    def __init__(self, whole: RecordedPass, rows: int, examples: int) -> None:
        context = whole.context
        weights = context.weights(examples * whole.views, rows)
        super().__init__(context.parameters, context.values(), weights)
        self.examples, self._whole = examples, whole

    @property
    def example_weights(self) -> Tensor:
        """Weight of each place in the padded batch: 1 if it holds an example, otherwise 0."""
        views = self._whole.views
        return self.weights if views == 1 else self.weights[::views]

    def clipped(self, clip: ClipBounds) -> ClippedRows:
        """Return the clipped gradients of the examples."""
        uses = by_example(by_parameter(self.uses), self._whole.views)
        return clipped_rows(uses, clip, times=self._whole.gradient_factor)

    def note(self, use: ExampleUse) -> None:
        """Record a call of a layer that a backward pass has reached.

        Raises:
            BackwardError: a batch has already used the gradients of this forward pass.
        """
        if not self.is_running:
            self._whole.note()
            super().note(use)


class RecordingForward:
    """Replacement for the `forward` of a model, which records its calls from then on.

    Args:
        model: the model.
        record: function of the original `forward`, its positional and its keyword arguments. It
            records the call and returns the outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self._model, self._record = model, record
        self._before = vars(model).get("forward")
        self._original: Callable[..., Any] = model.forward
        self._active = True
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, and record the call if gradients are enabled."""
        if not (self._active and torch.is_grad_enabled()):
            return self._original(*args, **kwargs)
        return self._record(self._original, args, kwargs)

    def restore(self) -> None:
        """Restore the original `forward` of the model."""
        self._active = False
        restore_method(vars(self._model), "forward", self, self._before)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Restore the original `forward` of the model during a `with` block."""
        installed = vars(self._model).get("forward") is self
        self.restore()
        try:
            yield
        finally:
            self._active = True
            if installed:
                self._model.forward = self

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle of an attached model is a plain model with the original forward.
        return getattr, (self._model, "forward")


def refuse_gradient(name: str) -> Callable[[Tensor], None]:
    """Return a hook that raises if a gradient reaches a parameter outside a recorded pass.

    Args:
        name: name of the parameter, for the message.
    """

    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise BackwardError(
            f"parameter {name!r} got a gradient outside the recorded forward pass, so it is not "
            "clipped. Call the attached model itself (not a submodule or a compiled copy) to "
            "compute outputs, keep penalties on weights out of the loss (use the optimizer's "
            "weight_decay), and make a forward pass after attach"
        )

    return refuse
