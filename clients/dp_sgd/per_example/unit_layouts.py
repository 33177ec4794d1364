"""Which layers can be run as one unit, and where the examples are in what they take and give."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedsim.clients.dp_sgd.per_example.module_use import Layout, Unit


def possible_units(
    model: nn.Module, names: Sequence[str], run: Callable[[int], object], sizes: tuple[int, int]
) -> dict[str, Unit]:
    """Return the layers among `names` that can be units.

    A layer can be one if all its calls have the same layout, with some argument and all outputs
    laid out by example. Which dimension is the examples' is seen by running lots of two sizes: it
    is the one that changes from one size to the other, so no fixed size is taken for it.

    Args:
        model: the model.
        names: names of its modules.
        run: runs the model on so many examples.
        sizes: two different numbers of examples.
    """
    first, second = (_shapes(model, names, run, size) for size in sizes)
    units = {}
    for name in names:
        layouts = _layouts(first[name], second[name], sizes)
        if layouts is not None and any(at is not None for at in layouts[0]):
            units[name] = Unit(name, model.get_submodule(name), *layouts)
    return units


Shapes = list[torch.Size]


def _shapes(
    model: nn.Module, names: Sequence[str], run: Callable[[int], object], size: int
) -> dict[str, list[tuple[Shapes, Shapes]]]:
    """Return the shapes of arguments and outputs of each call of the named modules."""
    calls: dict[str, list[tuple[Shapes, Shapes]]] = {name: [] for name in names}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name].append((_tensor_shapes((args, kwargs)), _tensor_shapes(output)))

        return hook

    hooks = [
        model.get_submodule(name).register_forward_hook(watch(name), with_kwargs=True)
        for name in names
    ]
    try:
        run(size)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _layouts(
    first: list[tuple[Shapes, Shapes]],
    second: list[tuple[Shapes, Shapes]],
    sizes: tuple[int, int],
) -> tuple[Layout, tuple[int, ...]] | None:
    """Return the layouts of arguments and outputs that all calls share, None if there is none."""
    if len(first) != len(second):
        return None
    found = {
        (_layout(one[0], two[0], sizes), _layout(one[1], two[1], sizes))
        for one, two in zip(first, second, strict=True)
    }
    inputs, outputs = found.pop() if len(found) == 1 else (None, None)
    if inputs is None or not outputs:
        return None
    known = tuple(at for at in outputs if at is not None)
    return (inputs, known) if len(known) == len(outputs) else None


def _tensor_shapes(values: Any) -> Shapes:
    return [value.shape for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _layout(first: Shapes, second: Shapes, sizes: tuple[int, int]) -> Layout | None:
    """Return the layout of tensors seen with two numbers of examples, None if there is none."""
    if len(first) != len(second):
        return None
    result: list[int | None] = []
    for one, two in zip(first, second, strict=True):
        if len(one) != len(two):
            return None
        changed = [d for d, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]]
        if len(changed) > 1 or any((one[d], two[d]) != sizes for d in changed):
            return None
        result.append(changed[0] if changed else None)
    return tuple(result)
