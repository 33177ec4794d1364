"""What every rule must do: all that it says about K clients' rows, against autograd."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fedsim.clients.gradients.layers.base import LayerUse, Operand, squared_norms

Reference = Callable[..., Tensor]  # maps a client's rows and parameters to outputs
Check = Callable[..., None]


@pytest.fixture(scope="session")
def check_rule() -> Check:
    """Check a rule of a layer: `(make_use, reference, x, shapes, clients=2, ...)`."""
    return _check_rule


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= tolerance * (wanted.norm() + wanted.numel() ** 0.5)


def _alone(
    reference: Reference, x: Tensor, values: Sequence[Tensor], g: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of one example's output with respect to the parameters."""
    leaves = [value.double().detach().requires_grad_() for value in values]
    outputs = reference(x.unsqueeze(0), *leaves)
    return torch.autograd.grad(outputs, leaves, g.unsqueeze(0).double(), materialize_grads=True)


def _check_rule(
    make_use: Callable[..., LayerUse],
    reference: Reference,
    x: Tensor,
    shapes: Sequence[tuple[int, ...]],
    *,
    clients: int,
    trained: Sequence[bool] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Check forward, input gradient, norms, sums and drop of a use.

    Args:
        make_use: a use from its operands.
        reference: of one client's rows (R, ...) and its parameters.
        x: (K · R, ...).
        shapes: of the parameters.
        clients: K, each with parameters of its own.
        trained: which parameters are trained; None: all.
        seed: of parameters and gradients.
        dtype: of the use; the reference is in float64.
    """
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    trained = trained or [True] * len(shapes)
    values = [
        normal(clients, *shape) if own else normal(*shape).expand(clients, *shape)
        for shape, own in zip(shapes, trained, strict=True)
    ]
    n, each = len(x), len(x) // clients
    x = x.to(dtype) if x.is_floating_point() else x
    exact = x.double().requires_grad_() if x.is_floating_point() else x
    parts = [
        reference(own, *(value[k].double() for value in values))
        for k, own in enumerate(exact.split(each))
    ]
    wanted = torch.cat(parts)
    g = normal(*wanted.shape)

    def filled() -> LayerUse:
        operands = [
            Operand(value, i if own else None)
            for i, (value, own) in enumerate(zip(values, trained, strict=True))
        ]
        use = make_use(*operands)
        before = x.clone()
        y = use.forward(x)
        assert torch.equal(x, before), "a layer leaves its input alone"
        _close(y, wanted.detach(), tolerance)
        if use.needs_input:
            use.input = x.detach()
        use.output_gradient = g.clone()
        return use

    use = filled()
    assert use.clients == clients
    if isinstance(exact, Tensor) and exact.requires_grad:
        (at_input,) = torch.autograd.grad(wanted, exact, g.double())
        _close(use.input_gradient(g), at_input, tolerance)
    alone = [
        _alone(reference, exact[i].detach(), [value[i // each] for value in values], g[i])
        for i in range(n)
    ]
    factors = torch.linspace(0.1, 1, n, dtype=dtype)
    dropped = torch.arange(n) % 3 == 1
    for index in use.parameters:
        rows = torch.stack([gradients[index] for gradients in alone])
        squared = squared_norms({index: filled()})[index]
        norms = rows.reshape(n, -1).square().sum(1)
        # Terms of a row's gradient may cancel: its rounding error is that of the largest term.
        slack, rounding = (1e-12, 1e-14) if dtype == torch.float64 else (1e-4, 1e-6)
        slip = rounding * norms.max().sqrt()
        assert squared.dtype == torch.float64
        assert (squared.sqrt() >= norms.sqrt() * (1 - slack) - slip).all()
        assert (squared.sqrt() <= norms.sqrt() * (1 + 1e-2) + slip + 3e-13).all()
        _close(filled().per_example(index), rows, tolerance)
        for measured in (False, True):
            use = filled()
            if measured:
                squared_norms({index: use})
            weights = factors.double().view(-1, *[1] * (rows.ndim - 1))
            for kept in (torch.ones(n, dtype=torch.bool), ~dropped):
                if not kept.all():
                    squared_norms({index: use})  # `drop` comes after the norms
                    use.drop(~kept)
                shown = rows * kept.view(-1, *[1] * (rows.ndim - 1))
                into = torch.ones(clients, *rows.shape[1:], dtype=dtype)
                use.add_weighted(index, factors.view(clients, -1), into)
                by_client = (shown * weights).unflatten(0, (clients, each)).sum(1)
                _close(into - 1, by_client, 10 * tolerance)
                into = torch.ones(clients, *rows.shape[1:], dtype=dtype)
                use.add_weighted(index, None, into)
                _close(into - 1, shown.unflatten(0, (clients, each)).sum(1), 10 * tolerance)
                _close(use.per_example(index), shown, tolerance)
    _check_poison(filled, x, dropped, factors, each)


def _check_poison(
    filled: Callable[[], LayerUse], x: Tensor, dropped: Tensor, factors: Tensor, each: int
) -> None:
    """A row that is not finite has such a norm, adds nothing once dropped, and spoils no other."""
    clean, dirty = filled(), filled()
    dirty.output_gradient[dropped] = torch.nan
    for index in dirty.parameters:
        norms, expected = squared_norms({index: dirty})[index], squared_norms({index: clean})[index]
        assert not torch.isfinite(norms[dropped]).any()
        assert torch.equal(norms[~dropped], expected[~dropped])
    for use in (dirty, clean):
        use.drop(dropped)
    for index in dirty.parameters:
        shape = dirty.per_example(index).shape[1:]
        sums = [torch.zeros(len(x) // each, *shape, dtype=factors.dtype) for _ in range(4)]
        dirty.add_weighted(index, factors.view(-1, each), sums[0])
        clean.add_weighted(index, factors.view(-1, each), sums[1])
        dirty.add_weighted(index, None, sums[2])
        clean.add_weighted(index, None, sums[3])
        torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(sums[2], sums[3], rtol=1e-4, atol=1e-6)
        assert torch.isfinite(sums[2]).all()
