"""A model's call, cut into tiles of a public number of rows, and its outputs, joined."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedsim.clients.gradients.interface import UncoveredParameterError
from fedsim.clients.gradients.tiles import padded_tiles
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.privacy_engine.forward_checks import all_tensors, map_tensors

Layout = dict[tuple[int, int], bool]
"""Whether a tensor of a call has rows, by the number of tensors in the call and its place."""


def call_in_tiles(
    args: tuple[Any, ...], kwargs: dict[str, Any], n: int, rows: int, layout: Layout
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments of each tile's call: rows of zeros follow the last example.

    Tensors with a row for each example are cut, and all other values given whole. Which are which
    is found out once: a table of classes may be as long as a later lot.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        n: rows of the whole call.
        rows: of a tile.
        layout: of the model's calls so far; filled in.

    Raises:
        UncoveredParameterError: an argument that had a row for each example has no longer.
    """
    tensors = list(all_tensors((args, kwargs)))
    for place, value in enumerate(tensors):
        has_rows = value.ndim > 0 and len(value) == n
        if layout.setdefault((len(tensors), place), has_rows) and not has_rows:
            raise UncoveredParameterError(
                f"an argument of the model has shape {tuple(value.shape)} for {n} rows; it had a "
                "row for each example before, so either give it one, or keep it in the model"
            )
    for start in range(0, n, rows):
        places = iter(range(len(tensors)))

        def own(value: Tensor, start: int = start, places: Iterator[int] = places) -> Tensor:
            if not layout[len(tensors), next(places)]:
                return value
            return padded_tiles(value[start : start + rows], rows)[0]

        yield map_tensors((args, kwargs), own)


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
