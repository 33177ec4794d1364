"""A model's trainable parameters as views of one flat tensor."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def modules_of(model: nn.Module) -> Iterable[nn.Module]:
    """Return what `model.modules()` yields, at a tenth of its time: each step asks for them."""
    found, waiting = dict[int, nn.Module](), [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            inner = vars(module)["_modules"].values()
            waiting += [part for part in reversed(inner) if part is not None]
    return found.values()


class FlatParameters:
    """Layout of a model's trainable parameters in one flat tensor.

    The model's parameters become views of `data`, so an optimizer over `data` updates the model in
    one pass. Tied parameters occur once.

    Args:
        model: the model; its trainable parameters are moved into the flat tensor, values unchanged.

    Attributes:
        data: the flat tensor (size,).
        names: name of each parameter. The position in this list is the index of the parameter.
        tensors: tensor of each parameter, a view of `data`.
        sizes: number of values of each parameter.
        size: number of trainable values.
        index: index of each parameter, by Python's `id` of its tensor.
        anchor: leaf tensor without a meaning of its own, on which recorded outputs depend.

    Raises:
        ValueError: no parameter is trainable, a lazy layer has no values yet, or parameters differ
            in type or device.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the model has no trainable parameters; set requires_grad on some")
        lazy = next((name for name, p in named if is_lazy(p)), None)
        if lazy is not None:
            layer = type(model.get_submodule(lazy.rpartition(".")[0])).__name__
            raise ValueError(
                f"parameter {lazy!r} of a {layer} has no values yet; call the model once on an "
                "example of the right shape, such as zeros, before the engine and the optimizer "
                "are made"
            )
        kinds = {(p.dtype, p.device) for _, p in named}
        if len(kinds) > 1:
            pairs = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ValueError(f"trainable parameters must share one type and device, got {pairs}")
        self.names: tuple[str, ...] = tuple(name for name, _ in named)
        self.tensors: tuple[nn.Parameter, ...] = tuple(parameter for _, parameter in named)
        self.sizes: tuple[int, ...] = tuple(parameter.numel() for parameter in self.tensors)
        self.size = sum(self.sizes)
        ends = list(accumulate(self.sizes))
        self._places = [slice(end - n, end) for end, n in zip(ends, self.sizes, strict=True)]
        self.data: Tensor = torch.cat([parameter.detach().flatten() for parameter in self.tensors])
        self.index: dict[int, int] = {id(p): i for i, p in enumerate(self.tensors)}
        self.anchor = torch.zeros((), requires_grad=True)
        for parameter, view in zip(self.tensors, self.views(self.data), strict=True):
            parameter.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return one view of a flat tensor (size,) for each parameter, in the parameter's shape."""
        parts = flat.split_with_sizes(self.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.tensors, strict=True)]

    def slices(self, indices: Sequence[int]) -> list[slice]:
        """Return the slices of the flat tensor that hold the parameters with the given indices."""
        return [self._places[index] for index in indices]

    def group_slices(self, groups: Sequence[Sequence[int]]) -> list[tuple[slice, int]]:
        """Return pairs (slice of the flat tensor, index of a group) that cover the flat tensor.

        The slices are in order, and neighbouring parameters of the same group share a slice.

        Args:
            groups: indices of the parameters in each group; together these are all parameters.
        """
        of = {index: number for number, group in enumerate(groups) for index in group}
        slices: list[tuple[slice, int]] = []
        for index, place in enumerate(self._places):
            if slices and slices[-1][1] == of[index]:
                slices[-1] = (slice(slices[-1][0].start, place.stop), of[index])
            else:
                slices.append((place, of[index]))
        return slices

    def stacked_views(self, rows: Tensor) -> list[Tensor]:
        """Return, for each parameter, a view (K, *shape) into K clients' flat values (K, size)."""
        parts, clients = rows.detach().split_with_sizes(self.sizes, 1), rows.shape[0]
        return [part.view(clients, *p.shape) for part, p in zip(parts, self.tensors, strict=True)]
