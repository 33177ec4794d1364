"""Products by either library are products, keep examples apart, and train cohorts to the bit."""

import logging

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.cohort.ragged import aligned
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.per_example import products
from fedsim.clients.dp_sgd.per_example.backend import gradients_for
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleLoss
from fedsim.clients.dp_sgd.per_example.products import (
    FEWEST_IN_BATCH,
    add_product,
    affine,
    is_special,
    product,
)
from fedsim.clients.dp_sgd.sampling import PoissonSampling
from fedsim.clients.settings import LocalSettings, SgdSettings
from fedsim.clients.training.cohorts import CohortMember, cohorts_agree, train_alone, train_together
from fedsim.clients.training.local_training import StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.models.losses import cross_entropy

LARGE = (70, 400, 420)  # 11.8 million multiplications: more than are left to torch


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-6 * exact.norm().item())


@pytest.mark.parametrize("sizes", [LARGE, (7, 5, 3), (3, 3000, 2500)])
def test_products_are_products(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b, w, shift = matrix(m, k), matrix(k, n, seed=1), matrix(n, k, seed=2), matrix(n, seed=3)
    a64, w64 = a.double(), w.double()
    close(product(a, b), a64 @ b.double())
    close(affine(a, w, shift), a64 @ w64.t() + shift)
    close(affine(a, w, None), a64 @ w64.t())
    close(affine(a.view(m, 1, k), w, shift)[:, 0], a64 @ w64.t() + shift)
    close(product(w, a.t()), w64 @ a64.t())  # a transposed operand, as of weight gradients
    into = matrix(k, n, seed=4)
    expected = into.double() + a64.t() @ matrix(m, n, seed=5).double()
    add_product(into, a.t(), matrix(m, n, seed=5))
    close(into, expected)


@pytest.mark.parametrize("sizes", [LARGE, (7, 5, 3)])
def test_products_written_into_place_have_the_same_bits(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, w, shift = matrix(m, k), matrix(n, k, seed=2), matrix(n, seed=3)
    for b in (shift, None):
        out = torch.empty(m, n)
        assert affine(a, w, b, out=out) is out
        assert torch.equal(out, affine(a, w, b))
    out = torch.empty(m, n)
    assert product(a, w.t(), out=out) is out
    assert torch.equal(out, product(a, w.t()))


def test_small_products_and_other_types_are_left_to_torch() -> None:
    assert not is_special(torch.empty(0), 10, 10, 10)
    assert not is_special(torch.empty(0, dtype=torch.float64), *LARGE)
    small, large = (matrix(8, 6), matrix(4, 6)), (matrix(70, 300), matrix(330, 300))
    for x, w in (small, tuple(part.double() for part in large)):
        assert torch.equal(affine(x, w, None), nn.functional.linear(x, w))


@given(count=st.integers(1, 9), m=st.integers(1, 40), k=st.integers(1, 70), n=st.integers(2, 70))
@example(count=7, m=8, k=64, n=32)
@example(count=7, m=9, k=32, n=10)  # results that begin anywhere
@example(count=7, m=31, k=10, n=128)
def test_batched_products_are_those_alone_within_rounding(
    count: int, m: int, k: int, n: int
) -> None:
    """Whether to the bit is up to the library and the processor; federations check it."""
    assume(m * k * n >= FEWEST_IN_BATCH)
    rows = aligned(m)
    x, out = matrix(count * rows, k).view(count, rows, k), torch.zeros(count, rows, n)
    w, shift = stacked(count, n, k), matrix(count, n, seed=2)
    products.products(x[:, :m], w.transpose(1, 2), out[:, :m])
    for own, own_x, own_w in zip(out, x, w, strict=True):
        close(own[:m], own_x[:m].double() @ own_w.double().t())
    products.shifted_products(shift.unsqueeze(1), x[:, :m], w.transpose(1, 2), out[:, :m])
    for own, own_x, own_w, own_shift in zip(out, x, w, shift, strict=True):
        close(own[:m], own_x[:m].double() @ own_w.double().t() + own_shift)
    assert (out[:, m:] == 0).all()
    back = torch.zeros(count, rows, k)
    products.products(out[:, :m], w, back[:, :m])
    for own, own_out, own_w in zip(back, out, w, strict=True):
        close(own[:m], own_out[:m].double() @ own_w.double())


@given(count=st.integers(1, 9), m=st.integers(1, 40), k=st.integers(1, 70), n=st.integers(2, 70))
@example(count=7, m=8, k=64, n=32)
@example(count=7, m=9, k=32, n=10)
def test_batched_products_add_up_as_those_alone_within_rounding(
    count: int, m: int, k: int, n: int
) -> None:
    assume(m * k * n >= FEWEST_IN_BATCH)
    rows = aligned(m)
    x, g = (matrix(count * rows, of).view(count, rows, of)[:, :m] for of in (k, n))
    into, before = stacked(count, n, k), stacked(count, n, k).double()
    products.add_products(into, g.transpose(1, 2), x)
    for own, own_before, own_g, own_x in zip(into, before, g, x, strict=True):
        close(own, own_before + own_g.double().t() @ own_x.double())


@given(
    count=st.integers(1, 9),
    batch=st.integers(1, 20),
    k=st.integers(1, 70),
    n=st.integers(2, 70),
    private=st.booleans(),
)
@example(count=7, batch=8, k=64, n=32, private=True)
@example(count=7, batch=9, k=32, n=10, private=True)
@example(count=9, batch=20, k=70, n=2, private=False)
@settings(max_examples=25, deadline=None)
def test_where_the_check_finds_the_same_bits_every_cohort_has_them(
    count: int, batch: int, k: int, n: int, private: bool
) -> None:
    """Where it does not, as on some processors, a federation trains its clients one by one."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(k, n), matrix(40, k), torch.arange(40) % n
    gradients = gradients_for(model, cross_entropy, x[:4], y[:4]) if private else None
    bench = SharedModel(model, parameters=None if gradients is None else gradients.parameters)
    step = DpSgdMechanism(PoissonSampling(0.5), FlatClipping(0.7), 1.0, batch) if private else None
    optimizer = SgdSettings(name="sgd", lr=0.1)
    local = LocalSettings(steps=2, batch_size=batch, optimizer=optimizer)
    if not cohorts_agree(bench, cross_entropy, gradients, local, x, y, step):
        return
    members = [
        CohortMember(
            matrix(2 * batch - number % 2, k, seed=number),
            torch.arange(2 * batch - number % 2) % n,
            StreamKey(7, number, 1),
            range(2),
            step,
        )
        for number in range(count)
    ]
    together = train_together(bench, cross_entropy, local, members)
    for row, member in zip(together.values, members, strict=True):
        train_alone(bench, cross_entropy, gradients, local, member)
        assert torch.equal(row, bench.parameters.data)


def stacked(count: int, n: int, k: int) -> Tensor:
    """Return matrices (count, n, k) as they lie among the values of clients with more of them."""
    return matrix(count, aligned(n * k + 5))[:, : n * k].view(count, n, k)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_broken_row_breaks_no_other(wrong: float) -> None:
    m, k, n = LARGE
    a, b = matrix(m, k), matrix(k, n, seed=1)
    whole = product(a, b)
    broken = a.clone()
    broken[13] = wrong
    kept = [i for i in range(m) if i != 13]
    assert torch.equal(product(broken, b)[kept], whole[kept])
    assert not torch.isfinite(product(broken, b)[13]).any()


@pytest.mark.parametrize("private", [True, False])
def test_cohorts_of_special_products_are_clients_alone_or_train_one_by_one(
    private: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which of both it is depends on how the processor's library rounds."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(products, "FEWEST", 500)
    found = agree(nn.Linear(40, 10), cross_entropy, private=private)
    assert found or "would round differently" in caplog.text


@pytest.mark.parametrize("private", [True, False])
def test_cohorts_of_models_with_one_output_are_clients_alone_or_train_one_by_one(
    private: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = agree(nn.Linear(40, 1), squared_error, private=private)
    assert found or "would round differently" in caplog.text


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def agree(last: nn.Module, loss: PerExampleLoss, *, private: bool) -> bool:
    """Whether clients of a model with this last layer train together as each does alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, 40), nn.ReLU(), last)
    x, y = matrix(40, 90), torch.arange(40) % 10
    gradients = gradients_for(model, loss, x[:4], y[:4]) if private else None
    bench = SharedModel(model, parameters=None if gradients is None else gradients.parameters)
    step = DpSgdMechanism(PoissonSampling(0.5), FlatClipping(0.7), 1.0, 16.0) if private else None
    optimizer = SgdSettings(name="sgd", lr=0.1)
    local = LocalSettings(steps=2, batch_size=16, optimizer=optimizer)
    return cohorts_agree(bench, loss, gradients, local, x, y, step)
