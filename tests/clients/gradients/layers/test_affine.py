"""Scales and shifts of normalised inputs, for each client."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedsim.clients.gradients.layers.affine import AffineUse


def spread(values: Tensor, after: int) -> Tensor:
    return values.reshape(*values.shape, *[1] * after)


@pytest.mark.parametrize(("clients", "dtype"), [(1, torch.float64), (3, torch.float32)])
@pytest.mark.parametrize(
    ("shape", "own", "after"),
    [
        ((6,), (6,), 0),
        ((3, 6), (6,), 0),
        ((2, 3, 4), (3, 4), 0),
        ((4, 5), (4,), 1),
        ((4, 3, 2), (4,), 2),
        ((2, 3, 2, 2), (2,), 3),
        ((3, 2), (), 2),
        ((3, 30, 20), (30, 20), 0),
    ],
)
def test_scales_and_shifts_are_autograds(
    check_rule: Callable[..., None],
    shape: tuple[int, ...],
    own: tuple[int, ...],
    after: int,
    dtype: torch.dtype,
    clients: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * clients, *shape, generator=generator).double()

    def both(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x * spread(w, after) + spread(b, after)

    def check(make: Callable[..., AffineUse], run: Callable[..., Tensor], count: int) -> None:
        check_rule(make, run, x, [own] * count, clients=clients, dtype=dtype)

    check(lambda w, b: AffineUse(w, b, after), both, 2)
    check(lambda w: AffineUse(w, None, after), lambda x, w: x * spread(w, after), 1)
    check(lambda b: AffineUse(None, b, after), lambda x, b: x + spread(b, after), 1)
    for trained in ((True, False), (False, True)):
        check_rule(
            lambda w, b: AffineUse(w, b, after),
            both,
            x,
            [own] * 2,
            clients=clients,
            dtype=dtype,
            trained=trained,
        )


def test_a_scale_or_a_shift_is_needed() -> None:
    with pytest.raises(ValueError, match="a weight or a bias, got neither"):
        AffineUse(None, None)
