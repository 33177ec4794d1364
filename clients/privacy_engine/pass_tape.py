"""Tape of one forward pass of an attached model, filled by backward passes through it."""

from typing import Any

from fedsim.clients.dp_sgd.per_example.layers import ExampleUse
from fedsim.clients.dp_sgd.per_example.module_use import ModuleUse
from fedsim.clients.dp_sgd.per_example.tape import Tape
from fedsim.core.errors import FedsimError


class BackwardError(FedsimError, RuntimeError):
    """Gradients that cannot be attributed to examples."""


class PassTape(Tape):
    """The tape of one forward pass of an attached model.

    It adds itself to the pending tapes when a backward pass reaches it: a forward pass without a
    backward pass leaves nothing behind.

    Attributes:
        taken: whether its gradients are in a lot.
        units: layers that ran as units, whose gradients autograd puts into their `leaves`.
    """

    def __init__(self, index: dict[int, int], examples: int, pending: "list[PassTape]") -> None:
        super().__init__(index, examples)
        self.taken = False
        self.units: list[ModuleUse] = []
        self._pending = pending

    @property
    def ran_twice(self) -> bool:
        """Whether two backward passes went through one use."""
        return len({id(use) for use in self.uses}) < len(self.uses)

    def note(self, use: Any) -> None:
        """Record a use that a backward pass has filled.

        Raises:
            BackwardError: the gradients of this forward pass are in a lot already.
        """
        before = len(self.uses)
        super().note(use)
        if len(self.uses) > before:
            self._reached()

    def watch_units(self) -> None:
        """Detect backward passes that reach units, which are not on the tape."""
        for unit in self.units:
            for leaf in unit.leaves:
                leaf.register_post_accumulate_grad_hook(lambda _: self._reached())

    def gradients(self, factor: int) -> list[ExampleUse]:
        """Return all filled uses, with the examples' gradients multiplied by `factor`."""
        for use in self.uses:
            use.output_gradient = use.output_gradient * factor
        units = []
        for unit in self.units:
            found = [None if leaf.grad is None else leaf.grad * factor for leaf in unit.leaves]
            units.append(unit.filled(iter(found)))
        return [*self.uses, *units]

    def clear(self) -> None:
        """Drop the gradients."""
        self.uses.clear()
        for unit in self.units:
            for leaf in unit.leaves:
                leaf.grad = None
        if self.taken:  # units hold a gradient for each example, and are not filled again
            self.units = []

    def _reached(self) -> None:
        if self.taken:
            self.clear()
            raise BackwardError(
                "backward ran again through a forward pass whose gradients are in the lot already "
                "(retain_graph); its examples would count twice. Add the losses up and call "
                "backward once, or make a new forward pass after optimizer.step()"
            )
        if not any(made is self for made in self._pending):
            self._pending.append(self)
