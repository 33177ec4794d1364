"""Records how a model uses its parameters, while it runs unchanged.

Inside `Tape`, every torch operation that takes a tracked parameter is routed to a `Use`, whose
backward pass notes the gradient of its output and makes no weight gradient. Each call has a record
of its own, so layers may be reused and forwards may interleave. An operation that uses a tracked
parameter in a way that no `Use` covers is noted in `uncovered`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fedsim.clients.dp_sgd.per_example.layers import Use
from fedsim.clients.dp_sgd.per_example.recorder import Recordable
from fedsim.clients.dp_sgd.per_example.routes import HARMLESS, ROUTES


class Tape(TorchFunctionMode):
    """Notes the uses of tracked parameters during forward passes of `examples` examples.

    Guarantee: a use is noted when a backward pass that starts outside the tape goes through it,
    once for each such pass: forwards without a backward leave nothing, and forwards may interleave.

    Args:
        index: parameter index by `id`.
        examples: number of examples n; every input of a use must be (n, ...).
        routes: how operations become uses.
        stacked: for routes that replace parameters by other tensors, by `id`.

    Attributes:
        uses: filled by backward passes.
        uncovered: indices of parameters that no route covered; filled by the forward pass.
    """

    def __init__(
        self,
        index: Mapping[int, int],
        examples: int,
        *,
        routes: Mapping[Any, Callable[..., Any]] = ROUTES,
        stacked: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.examples = examples
        self.stacked = {} if stacked is None else stacked
        self.uses: list[Use] = []
        self.uncovered: set[int] = set()
        self._index, self._routes = index, routes
        self._anchor = torch.zeros((), requires_grad=True)
        self._running = 0

    def __enter__(self) -> Self:
        self._running += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._running -= 1
        super().__exit__(*error)

    def backward(
        self, loss: Tensor, others: Sequence[Tensor] = (), *, retain_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Fill every use that contributed to `loss` with the gradient of its output.

        Returns:
            The gradients of `others`, None where `loss` does not depend on one.
        """
        if not loss.requires_grad:
            return (None,) * len(others)
        wanted = (self._anchor, *others)
        return torch.autograd.grad(loss, wanted, retain_graph=retain_graph, allow_unused=True)[1:]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        index = self._index
        for value in args:
            if id(value) in index or isinstance(value, list | tuple):
                break
        else:
            if not kwargs or not any(id(value) in index for value in kwargs.values()):
                return func(*args, **kwargs)
        route = self._routes.get(func)
        output = None if route is None else route(self, *args, **kwargs)
        if output is not None:
            return output
        if func not in HARMLESS and torch.is_grad_enabled():
            given = map(id, _parts(args, kwargs))
            self.uncovered.update(index[each] for each in given if each in index)
        return func(*args, **kwargs)

    def tracked(self, parameter: Any) -> int | None:
        """Return the index of a tracked parameter, else None."""
        return self._index.get(id(parameter))

    def record(self, use: Recordable, x: Tensor) -> Tensor | None:
        """Run a use on its input and note it; None where the input is not one row per example."""
        if x.ndim == 0 or x.shape[0] != self.examples:
            return None
        return _Recorded.apply(self._anchor, x, use, self)

    def note(self, use: Any) -> None:
        """Note a use that a backward pass has filled in.

        Backward passes of the model's own, inside its forward, are not those of the loss.
        """
        if not self._running:
            self.uses.append(use)


class _Recorded(torch.autograd.Function):
    """Runs a use and notes it on the tape in the backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, use: Recordable, tape: Tape) -> Tensor:
        ctx.use, ctx.tape = use, tape
        if use.needs_input:
            ctx.save_for_backward(x)
        else:
            ctx.shape = x.shape
        return use.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        use: Recordable = ctx.use
        # Where only a bias is trained, the input is not kept: a stand-in has its shape.
        saved = ctx.saved_tensors
        x = saved[0] if saved else g.new_empty(1).expand(ctx.shape)
        # Without its history: that would hold the uses, and they it, where no collector can see.
        use.input, use.output_gradient = x.detach(), g
        ctx.tape.note(use)
        return None, use.input_gradient(x, g) if ctx.needs_input_grad[1] else None, None, None


def _parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments, and what lists and tuples among them hold."""
    return [
        part
        for value in (*args, *kwargs.values())
        for part in (value if isinstance(value, list | tuple) else (value,))
    ]
