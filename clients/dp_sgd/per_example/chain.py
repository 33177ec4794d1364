"""Models that are plain sequences of known layers, run forwards and backwards by hand.

`Tape` finds the uses of parameters in any model, by watching every operation and by a backward
pass of torch. For small models that watching takes longer than the arithmetic. A chain knows the
layers beforehand and calls their operations one after the other; the uses it returns, and every bit
in them, are those of a tape, but for images that it keeps in another order of memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.per_example.image_order import arrange
from fedsim.clients.dp_sgd.per_example.interface import UncoveredParameterError
from fedsim.clients.dp_sgd.per_example.layers import ConvolutionUse, LinearUse
from fedsim.clients.dp_sgd.per_example.layers.base import Use
from fedsim.clients.dp_sgd.per_example.links import LINKS, Layer, Link, pair
from fedsim.clients.dp_sgd.per_example.loss_gradient import KnownGradient


class Chain:
    """A model as a sequence of links.

    Args:
        model: the model.
        links: its layers in order.
        index: parameter index by `id`, of the trained ones.
    """

    def __init__(self, model: nn.Module, links: Sequence[Link], index: Mapping[int, int]) -> None:
        self._hooks = tuple(vars(module)[name] for module in model.modules() for name in _HOOKS)
        self.links, self._index = tuple(links), index
        arrange(self.links)
        trained = [
            place
            for place, link in enumerate(self.links)
            if isinstance(link, Layer) and any(id(p) in index for p in pair(link.module))
        ]
        self._first = trained[0]

    @property
    def undisturbed(self) -> bool:
        """Whether nobody hooked into the model since: what a hook does, only the model knows."""
        return not any(self._hooks)

    @property
    def sums_gradients(self) -> bool:
        """Whether all layers are ones for which `mean_gradients` is faster than torch."""
        layers = (link for link in self.links if isinstance(link, Layer))
        return all(type(layer.module) in (nn.Linear, nn.Conv2d) for layer in layers)

    @torch.no_grad()
    def record(
        self,
        features: Tensor,
        output_gradient: Callable[[Tensor], Tensor | None],
        counterpart: Callable[[Use], Any] | None = None,
    ) -> list[Any]:
        """Return the uses of trained parameters, last layer first, with their gradients filled in.

        Args:
            features: (n, ...).
            output_gradient: gives the gradient at the model's outputs; None where there is none.
            counterpart: what runs in the place of each use.

        Raises:
            UncoveredParameterError: the model has no rule for such inputs.
        """
        kept: list[Any] = []
        x = features
        for link in self.links:
            if isinstance(link, Layer):
                use = link.use(self._index, x.ndim)
                running = use if counterpart is None else counterpart(use)
                if running is None:
                    raise UncoveredParameterError("no rule for a layer", tuple(use.parameters))
                # Where only a bias is trained, the input is not kept: a stand-in has its shape.
                held = x if use.needs_input else x.new_empty(1).expand(x.shape)
                kept.append((running, held, bool(use.parameters)))
                x = running.forward(x)
            else:
                x, own = link.forward(x)
                kept.append(own)
        g = output_gradient(x)
        return [] if g is None else self._back(g, kept)

    @torch.no_grad()
    def mean_gradients(
        self, features: Tensor, targets: Tensor, loss: KnownGradient
    ) -> list[Tensor]:
        """Return the gradients of the mean loss by parameter index, where `sums_gradients`.

        Args:
            features: (n, ...).
            targets: (n, ...).
            loss: one value per example.
        """

        def at_outputs(outputs: Tensor) -> Tensor:
            weights = outputs.new_full((len(outputs),), len(outputs)).reciprocal_()
            return loss.output_gradient(outputs, targets, weights)

        uses: list[LinearUse | ConvolutionUse] = self.record(features, at_outputs)
        found = {index: use.sum_of(index) for use in uses for index in use.parameters}
        return [found[index] for index in range(len(found))]

    def _back(self, g: Tensor, kept: list[Any]) -> list[Any]:
        uses = []
        for place in range(len(self.links) - 1, self._first - 1, -1):
            link = self.links[place]
            if not isinstance(link, Layer):
                g = link.backward(g, kept[place])
                continue
            running, x, trained = kept[place]
            if trained:
                running.input, running.output_gradient = x, g
                uses.append(running)
            if place > self._first:
                g = running.input_gradient(x, g)
        return uses


def chain_of(model: nn.Module, index: Mapping[int, int]) -> Chain | None:
    """Return a model as a chain; None where it is not a plain sequence of known layers.

    Args:
        model: the model.
        index: parameter index by `id`, of the trained ones.
    """
    links: list[Link] = []
    for module in _sequence(model):
        made = None if "forward" in vars(module) else LINKS.get(type(module))
        found = None if made is None else made(module)
        if found is None:
            return None
        links += found
    layers = [link for link in links if isinstance(link, Layer)]
    used = [id(p) for link in layers for p in pair(link.module) if id(p) in index]
    if not used or len(used) != len(set(used)) or set(used) != set(index):
        return None
    chain = Chain(model, links, index)
    return chain if chain.undisturbed else None


def _sequence(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested sequences in their order."""
    if type(module) is not nn.Sequential or "forward" in vars(module):
        yield module
        return
    for child in module:
        yield from _sequence(child)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
