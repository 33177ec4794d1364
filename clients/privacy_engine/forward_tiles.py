"""A model's call, cut into tiles of a public number of rows, and its outputs, joined."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedsim.clients.dp_sgd.model_checks.safety import UnsafeModelError
from fedsim.clients.dp_sgd.tiles import padded_tiles
from fedsim.clients.privacy_engine.forward_checks import map_tensors


def call_in_tiles(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], n: int, rows: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments of each tile's call: rows of zeros follow the last example.

    Tensors whose first dimension is n have a row for each example; others are given whole.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        n: rows of the whole call.
        rows: of a tile.
    """
    for place in range(-(-n // rows)):

        def own(value: Tensor, place: int = place) -> Tensor:
            if value.ndim == 0 or len(value) != n:
                return value
            return padded_tiles(value[place * rows : (place + 1) * rows], rows)[0]

        yield map_tensors(args, own), {name: map_tensors(v, own) for name, v in kwargs.items()}


def join_outputs(found: Sequence[Any], n: int, rows: int) -> Any:
    """Return the outputs of all tiles as those of one call with n rows.

    Args:
        found: outputs of each tile.
        n: rows of the whole call.
        rows: of a tile.

    Raises:
        UnsafeModelError: a tensor among the outputs has no row for each row of the call.
    """
    flat = [pytree.tree_flatten(outputs) for outputs in found]
    joined = [_join(parts, n, rows) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(joined, flat[0][1])


def _join(parts: Sequence[Any], n: int, rows: int) -> Any:
    first = parts[0]
    if not isinstance(first, Tensor):
        return first
    if first.ndim == 0 or len(first) != rows:
        raise UnsafeModelError(
            f"the model returns a tensor of shape {tuple(first.shape)} for {rows} rows: it has no "
            "row for each example, so it may mix them; return tensors with one row for each "
            "example, and compute the loss outside"
        )
    whole = torch.cat(list(parts)) if len(parts) > 1 else first
    return whole if len(whole) == n else whole[:n]
