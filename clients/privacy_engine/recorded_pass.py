"""One forward pass of an attached model, filled in by the user's backward pass through it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.clients.gradients.layers.base import ExampleUse
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.recording import Recording
from fedsim.core.errors import FedsimError


class BackwardError(FedsimError, RuntimeError):
    """Gradients that cannot be attributed to examples."""


@dataclass
class PassContext:
    """What all forward passes of an attached model share.

    Attributes:
        pending: the passes that a backward pass has reached, and that are in no lot.
        part: returns the number of the part of a lot that is given out now.
        losses: number of losses of the `engine.backward` call that is running; None: none is.
        outputs: of the last forward pass, until it is checked that losses keep its rows apart.
        checks_left: calls of `engine.backward` that are still checked.
    """

    pending: "list[RecordedPass]"
    part: Callable[[], int] = lambda: 0
    losses: int | None = None
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    checks_left: int = 3


class RecordedPass:
    """One forward pass of an attached model, in tiles of a public number of rows.

    It adds itself to the pending passes when a backward pass reaches it: a forward pass without a
    backward pass leaves nothing behind.

    Args:
        parameters: of the model; their values stay where they are.
        examples: n.
        views: K, the rows of each example, side by side.
        context: of the model.

    Attributes:
        tiles: in the order of their examples.
        part: of a lot, given out when the pass was made.
        losses: number of losses given to `engine.backward`; None: the caller ran backward.
    """

    def __init__(
        self, parameters: FlatParameters, examples: int, views: int, context: PassContext
    ) -> None:
        self.examples, self.views, self.tiles = examples, views, list[TileRecording]()
        self.part = context.part()
        self.losses: int | None = None
        self._context, self._taken = context, False
        self._ways = set[int | None]()  # what the backward passes through it were called with
        self._parameters = parameters
        self._values = [tensor.detach().unsqueeze(0) for tensor in parameters.tensors]

    def start_tile(self, rows: int) -> "TileRecording":
        """Return the recording of the next tile, of so many rows."""
        tile = TileRecording(self._parameters, self._values, rows, self)
        self.tiles.append(tile)
        return tile

    def note(self) -> None:
        """Note that a backward pass has reached a use.

        Raises:
            BackwardError: the gradients of this forward pass are in a lot already.
        """
        if self._taken:
            raise BackwardError(
                "backward ran again through a forward pass whose gradients are in the lot already "
                "(retain_graph); its examples would count twice. Add the losses up and call "
                "backward once, or make a new forward pass after optimizer.step()"
            )
        self._ways.add(self._context.losses)
        if not any(other is self for other in self._context.pending):
            self._context.pending.append(self)

    def take(self) -> None:
        """Note that the uses are put into a lot.

        Raises:
            BackwardError: two backward passes went through one use, or losses of several kinds.
        """
        uses = [use for tile in self.tiles for use in tile.uses]
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

    def gradient_factor(self, *, is_mean: bool) -> float:
        """Return the factor from what was recorded to an example's own gradient.

        That is the mean over its views. Losses of `engine.backward` have no factor of their own, so
        that n does not enter.

        Args:
            is_mean: whether the caller's loss is a mean over the rows, not a sum.
        """
        if self.losses is None and is_mean:
            return float(self.examples)
        return 1.0 if self.losses == self.examples else 1.0 / self.views

    def clear(self) -> None:
        """Drop the gradients."""
        self._ways.clear()
        for tile in self.tiles:
            if self._taken:  # the user's graph may live on
                for use in tile.uses:
                    use.forget()
            tile.uses.clear()


class TileRecording(Recording):
    """The uses of parameters in one tile of a forward pass.

    Args:
        parameters: of the model.
        values: of one client (1, *shape), by index.
        rows: of the tile.
        whole: the forward pass.
    """

    def __init__(
        self, parameters: FlatParameters, values: Sequence[Tensor], rows: int, whole: RecordedPass
    ) -> None:
        super().__init__(parameters, values, rows)
        self._whole = whole

    def note(self, use: ExampleUse) -> None:
        """Note a use that a backward pass has filled in.

        Raises:
            BackwardError: the gradients of this forward pass are in a lot already.
        """
        if not self.is_running:
            self._whole.note()
            super().note(use)


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
