"""Models that are plain sequences of known layers, run forwards and backwards by hand.

`Tape` finds the uses of parameters in any model, by watching every operation and by a backward
pass of torch. For small models that watching takes longer than the arithmetic. A chain knows the
layers beforehand and calls their operations one after the other; the uses it returns, and every bit
in them, are those of a tape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.example_gradients import PerExampleLoss, UncoveredParameterError
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.uses import AffineUse, ConvolutionUse, LinearUse
from fedsim.clients.dp_sgd.uses.base import Use

_aten = torch.ops.aten


class Running(Protocol):
    """A use, or the like of one, as a chain runs it."""

    input: Tensor
    output_gradient: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        ...

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        ...


class KnownGradient(Protocol):
    """A loss that knows its gradient without a backward pass of torch."""

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return, to the bit, what torch gives for the sum of weighted losses at the outputs."""
        ...


class Function(Protocol):
    """A link without parameters."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs of this pass."""
        ...

    def backward(self, g: Tensor, kept: Any) -> Tensor:
        """Return the gradient with respect to the input."""
        ...


class Layer:
    """A link with parameters.

    Args:
        module: whose parameters they are.
        use: makes its use from the indices of weight and bias, None for one that is not trained.
        dimensions: that an input must have; None: any.
    """

    def __init__(
        self,
        module: nn.Module,
        use: Callable[[int | None, int | None], Use],
        dimensions: int | None = None,
    ) -> None:
        self.module, self._make, self._dimensions = module, use, dimensions

    def use(self, index: Mapping[int, int], dimensions: int) -> Use:
        """Return a use of the layer on an input with so many dimensions.

        Raises:
            UncoveredParameterError: on such an input the layer does something else.
        """
        weight, bias = (index.get(id(p)) for p in _pair(self.module))
        if self._dimensions not in (None, dimensions):
            found = tuple(i for i in (weight, bias) if i is not None)
            raise UncoveredParameterError("a convolution needs one row per example", found)
        return self._make(weight, bias)


Link = Layer | Function


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
        trained = [
            place
            for place, link in enumerate(self.links)
            if isinstance(link, Layer) and any(id(p) in index for p in _pair(link.module))
        ]
        self._first = trained[0]

    @property
    def undisturbed(self) -> bool:
        """Whether nobody hooked into the model since: what a hook does, only the model knows."""
        return not any(self._hooks)

    @property
    def linear(self) -> bool:
        """Whether all layers are linear ones."""
        layers = (link for link in self.links if isinstance(link, Layer))
        return all(type(layer.module) is nn.Linear for layer in layers)

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
        self, features: Tensor, targets: Tensor, loss: "KnownGradient"
    ) -> list[Tensor]:
        """Return the gradients of the mean loss by parameter index; all layers are linear.

        Args:
            features: (n, ...).
            targets: (n, ...).
            loss: one value per example.
        """

        def at_outputs(outputs: Tensor) -> Tensor:
            weights = outputs.new_full((len(outputs),), len(outputs)).reciprocal_()
            return loss.output_gradient(outputs, targets, weights)

        uses: list[LinearUse] = self.record(features, at_outputs)
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


def loss_gradient(
    loss: PerExampleLoss,
    outputs: Tensor,
    targets: Tensor,
    parameters: FlatParameters,
    weights: Tensor | None = None,
) -> Tensor | None:
    """Return the gradient of the sum of losses at the outputs, None where there is none.

    Args:
        loss: one value per example.
        outputs: (n, ...).
        targets: (n, ...).
        parameters: the model's, which the loss must not use.
        weights: of the losses (n,).

    Raises:
        UncoveredParameterError: the loss uses parameters by itself.
    """
    known = known_gradient(loss)
    if known is not None:
        return known.output_gradient(outputs, targets, weights)
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        losses = loss(leaf, targets)
        total = losses.sum() if weights is None else torch.dot(losses, weights)
    if not total.requires_grad:
        return None
    wanted = (leaf, *parameters.tensors)
    found, *strayed = torch.autograd.grad(total, wanted, allow_unused=True)
    refuse_strayed(strayed, parameters)
    return found


def known_gradient(loss: Any) -> KnownGradient | None:
    """Return the loss if it knows its gradient."""
    # To ask for an instance of a protocol takes as long as the gradient.
    return loss if hasattr(loss, "output_gradient") else None


def refuse_strayed(strayed: Sequence[Tensor | None], parameters: FlatParameters) -> None:
    """Refuse gradients that reached parameters by a way that no use has seen.

    Raises:
        UncoveredParameterError: there is one.
    """
    missed = tuple(i for i, gradient in enumerate(strayed) if gradient is not None)
    if missed:
        names = ", ".join(parameters.names[i] for i in missed)
        raise UncoveredParameterError(f"book-keeping has no rule for how {names} is used", missed)


def chain_of(model: nn.Module, index: Mapping[int, int]) -> Chain | None:
    """Return a model as a chain; None where it is not a plain sequence of known layers.

    Args:
        model: the model.
        index: parameter index by `id`, of the trained ones.
    """
    links: list[Link] = []
    for module in _sequence(model):
        made = None if "forward" in vars(module) else _LINKS.get(type(module))
        found = None if made is None else made(module)
        if found is None:
            return None
        links += found
    layers = [link for link in links if isinstance(link, Layer)]
    used = [id(p) for link in layers for p in _pair(link.module) if id(p) in index]
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


def _pair(module: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    found: Any = module._parameters
    return found.get("weight"), found.get("bias")


class _Identity:
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x, None

    def backward(self, g: Tensor, kept: Any) -> Tensor:
        return g


class _Flatten:
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x.flatten(1), x.shape

    def backward(self, g: Tensor, kept: torch.Size) -> Tensor:
        return g.reshape(kept)


class _Relu:
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = torch.relu(x)
        return y, y

    def backward(self, g: Tensor, kept: Tensor) -> Tensor:
        return _aten.threshold_backward.default(g, kept, 0)


class _Tanh:
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = torch.tanh(x)
        return y, y

    def backward(self, g: Tensor, kept: Tensor) -> Tensor:
        return _aten.tanh_backward.default(g, kept)


class _Sigmoid:
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = torch.sigmoid(x)
        return y, y

    def backward(self, g: Tensor, kept: Tensor) -> Tensor:
        return _aten.sigmoid_backward.default(g, kept)


class _MaxPool2d:
    def __init__(self, module: nn.MaxPool2d) -> None:
        stride = module.kernel_size if module.stride is None else module.stride
        self._options: tuple[Any, ...] = (
            _two(module.kernel_size),
            _two(stride),
            _two(module.padding),
            _two(module.dilation),
            module.ceil_mode,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y, places = _aten.max_pool2d_with_indices.default(x, *self._options)
        return y, (x, places)

    def backward(self, g: Tensor, kept: tuple[Tensor, Tensor]) -> Tensor:
        x, places = kept
        return _aten.max_pool2d_with_indices_backward.default(g, x, *self._options, places)


class _GroupNorm:
    """Without its scale and shift."""

    def __init__(self, module: nn.GroupNorm) -> None:
        self._groups, self._eps = module.num_groups, module.eps

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        x = x.contiguous()
        n, channels, size = x.shape[0], x.shape[1], x.shape[2:].numel()
        shape = (n, channels, size, self._groups)
        y, mean, scale = _aten.native_group_norm.default(x, None, None, *shape, self._eps)
        return y, (x, mean, scale, shape)

    def backward(self, g: Tensor, kept: Any) -> Tensor:
        x, mean, scale, shape = kept
        wanted = [True, False, False]
        g = g.contiguous()
        return _aten.native_group_norm_backward.default(g, x, mean, scale, None, *shape, wanted)[0]


def _linear(module: nn.Linear) -> list[Link]:
    def use(weight: int | None, bias: int | None) -> Use:
        return LinearUse(weight, bias, module.weight.detach(), _detached(module.bias))

    return [Layer(module, use)]


def _convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[Link] | None:
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    geometry: dict[str, Any] = {
        "stride": list(module.stride),
        "padding": list(module.padding),
        "dilation": list(module.dilation),
        "groups": module.groups,
    }

    def use(weight: int | None, bias: int | None) -> Use:
        w, b = module.weight.detach(), _detached(module.bias)
        return ConvolutionUse(weight, bias, w, b, **geometry)

    return [Layer(module, use, module.weight.ndim)]


def _group_norm(module: nn.GroupNorm) -> list[Link]:
    if not module.affine:
        return [_GroupNorm(module)]

    def use(weight: int | None, bias: int | None) -> Use:
        w, b = (p.detach().reshape(-1, 1, 1) for p in (module.weight, module.bias))
        return AffineUse(weight, bias, w, b, module.weight.shape)

    return [_GroupNorm(module), Layer(module, use, 4)]


def _flatten(module: nn.Flatten) -> list[Link] | None:
    return [_Flatten()] if (module.start_dim, module.end_dim) == (1, -1) else None


def _max_pool(module: nn.MaxPool2d) -> list[Link] | None:
    return None if module.return_indices else [_MaxPool2d(module)]


def _two(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _detached(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()


# Exactly these types: a subclass may do anything.
_LINKS: dict[type[nn.Module], Callable[[Any], list[Link] | None]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.Flatten: _flatten,
    nn.MaxPool2d: _max_pool,
    nn.Identity: lambda _: [_Identity()],
    nn.ReLU: lambda _: [_Relu()],
    nn.Tanh: lambda _: [_Tanh()],
    nn.Sigmoid: lambda _: [_Sigmoid()],
}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
