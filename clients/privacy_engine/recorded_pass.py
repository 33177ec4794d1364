"""One forward pass of an attached model, filled in by the user's backward pass through it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.layers.base import ExampleUse
from fedsim.clients.dp_sgd.per_example.recording import Recording
from fedsim.core.errors import FedsimError


class BackwardError(FedsimError, RuntimeError):
    """Gradients that cannot be attributed to examples."""


class RecordedPass(Recording):
    """The uses of parameters in one forward pass of an attached model.

    It adds itself to the pending passes when a backward pass reaches it: a forward pass without a
    backward pass leaves nothing behind.

    Args:
        parameters: of the model; their values stay where they are.
        examples: n.
        pending: the passes that a backward pass has reached, and that are in no lot.
    """

    def __init__(
        self, parameters: FlatParameters, examples: int, pending: "list[RecordedPass]"
    ) -> None:
        values = [tensor.detach().unsqueeze(0) for tensor in parameters.tensors]
        super().__init__(parameters, values, examples)
        self._pending, self._taken = pending, False

    def note(self, use: ExampleUse) -> None:
        """Note a use that a backward pass has filled in.

        Raises:
            BackwardError: the gradients of this forward pass are in a lot already.
        """
        if self.is_running:
            return
        if self._taken:
            raise BackwardError(
                "backward ran again through a forward pass whose gradients are in the lot already "
                "(retain_graph); its examples would count twice. Add the losses up and call "
                "backward once, or make a new forward pass after optimizer.step()"
            )
        super().note(use)
        if not any(other is self for other in self._pending):
            self._pending.append(self)

    def take(self) -> None:
        """Note that the uses are put into a lot.

        Raises:
            BackwardError: two backward passes went through one use.
        """
        if len({id(use) for use in self.uses}) < len(self.uses):
            self.clear()
            raise BackwardError(
                "backward ran twice through one forward pass (retain_graph), so gradients would be "
                "counted twice; add the losses up and call backward once"
            )
        self._taken = True

    def clear(self) -> None:
        """Drop the gradients."""
        if self._taken:  # the user's graph may live on
            for use in self.uses:
                use.forget()
        self.uses.clear()


class RecordingForward:
    """The `forward` of an attached model.

    Args:
        model: the model.
        record: runs the model's own forward on the given arguments, and records it.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self._model, self._record = model, record
        self._had_own = "forward" in vars(model)
        self._original: Callable[..., Any] = model.forward
        self._active = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, recorded where a backward pass may follow."""
        if not (self._active and torch.is_grad_enabled()):
            return self._original(*args, **kwargs)
        return self._record(self._original, args, kwargs)

    def install(self) -> None:
        """Record the model's forward passes from now on."""
        self._active = True
        self._model.forward = self

    def restore(self) -> None:
        """Put the model's own `forward` back."""
        self._active = False
        if vars(self._model).get("forward") is not self:
            return  # patched since by other code, which calls the original through this object
        if self._had_own:
            self._model.forward = self._original
        else:
            del self._model.forward

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Put the model's own `forward` back within the context."""
        installed = vars(self._model).get("forward") is self
        self.restore()
        try:
            yield
        finally:
            self._active = True
            if installed:
                self._model.forward = self

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle of an attached model is a plain model with its own forward.
        return getattr, (self._model, "forward")


def refuse_gradient(name: str) -> Callable[[Tensor], None]:
    """Return a hook that refuses gradients of a parameter that no recorded pass has seen."""

    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise BackwardError(
            f"parameter {name!r} got a gradient outside the recorded forward pass, so it is not "
            "clipped. Call the attached model itself (not a submodule or a compiled copy) to "
            "compute outputs, keep penalties on weights out of the loss (use the optimizer's "
            "weight_decay), and make a forward pass after attach"
        )

    return refuse
