"""The self-test of padded batches: rows that are not kept apart, bit for bit, are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn

from fedsim.clients.app import BatchClientApp
from fedsim.clients.faults import CoupledRowsError
from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.layers import linear
from fedsim.clients.gradients.layers.base import row_products
from fedsim.clients.gradients.per_example import PerExampleGradients
from fedsim.clients.model_checks.bit_isolation import RowIsolation
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.models.losses import cross_entropy
from fedsim.protocol.messages import TrainRequest
from fedsim.runs.runner import run_experiment

SMALL = 1.0 + 2.0**-22  # a change of two last bits
RowProducts = Callable[..., Tensor]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 10))


def gradients_of(model: nn.Module) -> tuple[PerExampleGradients, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(3, 20, generator=generator), torch.tensor([0, 4, 9])
    return gradients_for(model, cross_entropy, x, y), x, y


def check(model: nn.Module, clients: int = 3, rows: int = 16) -> None:
    RowIsolation(*gradients_of(model)).check(clients, rows)


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (4, 1), (3, 16), (1, 40)])
def test_tiles_that_keep_rows_apart_pass_and_leave_the_model_as_it_was(
    shape: tuple[int, int],
) -> None:
    model = mlp().train()
    before = [value.clone() for value in model.state_dict().values()]
    state = torch.get_rng_state()
    check(model, *shape)
    after = model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training


def by_place(rows: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
    """The last row of each client has other last bits."""
    found = row_products(rows, matrix, shift)
    if rows.shape[1] > 1:
        found[:, -1] *= SMALL
    return found


def by_parity(rows: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
    """Every other row has other last bits."""
    found = row_products(rows, matrix, shift)
    found[:, 1::2] *= SMALL
    return found


def by_zero_rows(rows: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
    """Products of fewer rows that are not zero have other last bits."""
    found = row_products(rows, matrix, shift)
    many = (rows != 0).any(2).sum(1) > rows.shape[1] // 2
    return torch.where(many.view(-1, 1, 1), found * SMALL, found)


def by_size(rows: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
    """Large values in one row change all rows of its client."""
    found = row_products(rows, matrix, shift)
    large = (rows.abs() > 500).flatten(1).any(1)
    return torch.where(large.view(-1, 1, 1), found * SMALL, found)


def by_neighbour(rows: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
    """Large values of the next client."""
    found = row_products(rows, matrix, shift)
    large = (rows.abs() > 500).flatten(1).any(1).roll(1)
    return torch.where(large.view(-1, 1, 1), found * SMALL, found)


EVERY, LAST_BACKWARD = (None, "0"), ((10, 24), "2")  # shape of the matrix, and the layer at fault
MUTANTS = [
    (by_place, "its place among the rows", *EVERY),
    (by_place, "its place among the rows", *LAST_BACKWARD),
    (by_parity, "its place among the rows", *EVERY),
    (by_parity, "its place among the rows", *LAST_BACKWARD),
    (by_zero_rows, "the number of examples", *EVERY),
    (by_size, "large values in the other rows", *EVERY),
    (by_neighbour, "large values in the other rows", *EVERY),
]


@pytest.mark.parametrize(("mutant", "what", "shape", "layer"), MUTANTS)
def test_mutation_rows_that_depend_on_other_rows_are_found_with_their_layer(
    mutant: RowProducts,
    what: str,
    shape: tuple[int, int] | None,
    layer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def products(rows: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
        is_wrong = shape is None or matrix.shape[1:] == shape
        return (mutant if is_wrong else row_products)(rows, matrix, shift)

    RowIsolation(*gradients_of(mlp())).check(3, 16)
    monkeypatch.setattr(linear, "row_products", products)
    isolation = RowIsolation(*gradients_of(mlp()))
    for _ in range(2):  # what was found is kept
        with pytest.raises(UnsafeModelError) as refused:
            isolation.check(3, 16)
        text = str(refused.value)
        assert "\n" not in text
        assert what in text
        assert f"layer '{layer}'" in text
        assert "3 x 16 rows" in text
    isolation.check(1, 1)  # each example alone
    assert isolation.height(1, 16) == 1
    with pytest.raises(UnsafeModelError, match=what):
        isolation.height(3, 16)


def test_the_next_height_is_taken_where_one_shape_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(rows: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
        is_wrong = rows.shape[1] in (16, 24)
        return (by_place if is_wrong else row_products)(rows, matrix, shift)

    monkeypatch.setattr(linear, "row_products", products)
    isolation = RowIsolation(*gradients_of(mlp()))
    assert isolation.height(2, 8) == 8
    assert isolation.height(2, 16) == 32
    assert isolation.height(2, 16, most=16) == 8


class Mixing(nn.Module):
    """Couples examples by less than the isolation check sees."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-6 * x.mean(0)


def test_a_coupling_within_rounding_is_refused() -> None:
    model = mlp()
    assert isinstance(model, nn.Sequential)
    with pytest.raises(UnsafeModelError, match=r"its place|in the other rows"):
        check(nn.Sequential(model[0], model[1], Mixing(), model[2]))


# --- In a federation ------------------------------------------------------------------------------


def experiment(**local: Any) -> dict[str, Any]:
    return {
        "name": "rows",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
        "model": {"name": "mlp", "args": {"hidden": [32]}},
        "federation": {"rounds": 1},
        "local": {"steps": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 1.0}, **local},
        "privacy": {"noise_multiplier": 1.5, "delta": 1e-3, "max_grad_norm": 1.0},
    }


@pytest.fixture
def _coupled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "row_products", by_place)


@pytest.mark.usefixtures("_coupled")
def test_a_run_is_refused_before_its_directory_exists(tmp_path: Path) -> None:
    with pytest.raises(UnsafeModelError, match=r"set local\.max_physical_batch: 1") as refused:
        run_experiment(experiment(), out=tmp_path / "r")
    assert refused.value.exit_code == 2
    assert not (tmp_path / "r").exists()
    alone = run_experiment(experiment(max_physical_batch=1), out=tmp_path / "alone")
    assert alone.status == "completed"


@pytest.mark.parametrize("block", [(0,), (0, 1)])
def test_a_client_refuses_by_itself_and_is_charged_nothing(
    block: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a SuperNode, and in the process of a worker."""
    reason = "layer '0': an example's contribution changes"
    monkeypatch.setattr(RowIsolation, "_first_difference", lambda *_: reason)
    ledger = tmp_path / "ledger.jsonl"
    federation = assemble(load_experiment(experiment()), ledger=ledger)
    app = BatchClientApp(federation.client_task, block_of=lambda round_number, client: block)
    request = TrainRequest(1, federation.initial_arrays())
    contexts = [Context(1, 7, {"partition-id": client}, RecordDict(), {}) for client in block]
    (answers,) = [list(group) for group in app.answer_requests((request, c) for c in contexts)]
    assert all(isinstance(answer, CoupledRowsError) for answer in answers)
    assert "an example's contribution changes" in str(answers[0])
    assert not ledger.exists()
