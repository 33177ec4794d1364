"""Norms in float64 that are never too small, and what rounding may add to a sum."""

import torch
from torch import Tensor

# Values of a lot's per-example gradients that are held at once: 16 MB in float32. Larger gradients
# of linear layers on sequences are made and dropped block by block, or never made.
BUDGET = 1 << 22


def zero_rows(values: Tensor, dropped: Tensor) -> Tensor:
    """Return values (n, ...) with the rows of dropped examples (n,) set to zero.

    Edge cases: a dropped row may hold NaN or infinity; multiplying it by 0 would leave NaN.
    """
    rows = dropped.view(-1, *[1] * (values.ndim - 1))
    return values.masked_fill(rows, 0)


def squares(values: Tensor) -> Tensor:
    """Squared norm of each example's values (n, ...), float64.

    Guarantee: never below the exact squared norm by more than float64 rounding.

    Edge cases: a row with NaN gives NaN, one with infinity gives infinity or NaN.
    """
    rows = values.flatten(1) if values.ndim > 1 else values.unsqueeze(1)
    return row_norms(rows).square_()


def row_norms(values: Tensor) -> Tensor:
    """Return the norms over the last dimension, float64."""
    # torch converts its whole argument first, so large ones go in parts.
    size = values.numel()
    if size <= BUDGET // 4:
        return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    each = max(1, values.shape[0] * (BUDGET // 4) // size)
    parts = [torch.linalg.vector_norm(p, dim=-1, dtype=torch.float64) for p in values.split(each)]
    return torch.cat(parts)


def unit_roundoff(values: Tensor) -> float:
    """Return the relative error of one product in a matrix product of such values."""
    if values.is_cuda and values.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-11
    return torch.finfo(values.dtype).eps / 2


def with_rounding(squared: Tensor, absolute: Tensor, error: float, terms: float) -> Tensor:
    """Return squared norms that also cover what rounding may add to the sums that are released.

    Args:
        squared: squared norms (n,) of sums of terms, computed in float64.
        absolute: (n,) bounds on the sums of the norms of the terms.
        error: relative to `absolute` squared, the rounding error of `squared` itself.
        terms: relative to `absolute`, the rounding error of the released sums.
    """
    exact = (squared + error * absolute.square()).clamp_(min=0).sqrt_()
    return (exact + terms * absolute).square_()
