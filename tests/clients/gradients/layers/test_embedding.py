"""Embedding tables: what an example looks up again is added up first, for each client."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.gradients.layers.base import Operand, squared_norms
from fedsim.clients.gradients.layers.embedding import EmbeddingUse
from fedsim.clients.gradients.per_example import OneAtATime
from fedsim.clients.gradients.rule_gradients import RuleGradients


@pytest.mark.parametrize(("clients", "dtype"), [(1, torch.float64), (3, torch.float32)])
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_tables_are_torchs(
    check_rule: Callable[..., None],
    shape: tuple[int, ...],
    padding: int | None,
    dtype: torch.dtype,
    clients: int,
) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 3, (3 * clients, *shape), generator=generator)
    rows.view(3 * clients, -1)[:, 0] = 2  # every example has a gradient, padding or not
    for found in (rows, rows.int()):
        check_rule(
            lambda w: EmbeddingUse(w, padding),
            lambda x, w: functional.embedding(x, w, padding_idx=padding),
            found,
            [(6, 4)],
            clients=clients,
            dtype=dtype,
        )


def test_sums_that_cancel_are_measured_as_they_are_released() -> None:
    generator = torch.Generator().manual_seed(6)
    g = torch.randn(1, 9, 4, generator=generator) * 1e8
    g[:, -1] = -g[:, :-1].sum(1)
    use = EmbeddingUse(Operand(torch.zeros(1, 6, 4), 0), None)
    use.input, use.output_gradient = torch.zeros(1, 9, dtype=torch.long), g
    norm = squared_norms({0: use})[0].sqrt()
    into = torch.zeros(1, 6, 4)
    use.add_weighted(0, torch.ones(1, 1), into)
    assert norm >= into.double().norm() * (1 - 1e-9)


def test_a_large_table_is_never_held_for_each_example() -> None:
    use = EmbeddingUse(Operand(torch.zeros(1, 100_000, 16), 0), None)
    use.input = torch.randint(0, 100_000, (64, 5))
    use.output_gradient = torch.randn(64, 5, 16)

    def dense(index: int) -> Tensor:
        raise AssertionError("64 tables of 6 MB")

    use.per_example = dense
    into = torch.zeros(1, 100_000, 16)
    squared_norms({0: use})
    use.add_weighted(0, torch.ones(1, 64), into)
    use.add_weighted(0, None, into)
    assert into.any()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().flatten(1).mean(1)


BAGS: list[dict[str, Any]] = [
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "sum", "padding_idx": 1},
    {"mode": "mean", "padding_idx": 1},
]


@pytest.mark.parametrize("options", BAGS)
@pytest.mark.parametrize("clients", [1, 3])
def test_bags_are_torchs(options: dict[str, Any], clients: int) -> None:
    """A bag of padding alone, too."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.EmbeddingBag(6, 4, **options), nn.Linear(4, 2)).double()
    x = torch.randint(0, 4, (4 * clients, 5))
    x[0] = 1
    exact = OneAtATime(model, loss)
    data = exact.parameters.data
    fast = RuleGradients(model, loss, parameters=exact.parameters)
    values = data + 0.1 * torch.randn(clients, len(data)).double()
    found = fast.gradients(x, torch.zeros(len(x)), values)
    for k in range(clients):
        data.copy_(values[k])
        own = slice(4 * k, 4 * k + 4)
        expected = exact.gradients(x[own], torch.zeros(4))
        torch.testing.assert_close(found[own], expected, rtol=1e-10, atol=1e-12)
