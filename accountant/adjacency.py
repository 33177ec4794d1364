"""Adjacency: which pairs of data sets a guarantee speaks about.

With per-example gradients clipped to norm C:

- "zero_out" (the default): one example's contribution is set to zero; the number of examples is
  public. The sum moves by at most C.
- "add_remove": one example is added or removed; the number of examples is private, so nothing
  public (sampling rate, number of steps, normaliser, weight) may be computed from it. C.
- "replace_one": one example becomes another; the number of examples is public. 2 C, so noise z C
  is only z / 2 times the sensitivity: epsilon is roughly twice that of the others.
"""

from typing import Literal, get_args

Adjacency = Literal["zero_out", "add_remove", "replace_one"]

ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)


def check_adjacency(value: str) -> Adjacency:
    """Return `value`; raises ValueError if it is not one of `ADJACENCIES`."""
    if value not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {list(ADJACENCIES)}, got {value!r}")
    return value
