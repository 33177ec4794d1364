"""Products by either library are products, keep examples apart, and train cohorts to the bit."""

import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.cohort_training import cohorts_agree
from fedsim.clients.dp_sgd import products
from fedsim.clients.dp_sgd.backend import gradients_for
from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.mechanism import DpSgdStep
from fedsim.clients.dp_sgd.products import add_product, affine, is_special, product
from fedsim.clients.dp_sgd.sampling import PoissonSampling
from fedsim.clients.settings import LocalSettings, SgdSettings
from fedsim.clients.workbench import Workbench
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
def test_cohorts_of_special_products_are_clients_alone_to_the_bit(
    private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "FEWEST", 500)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, 40), nn.ReLU(), nn.Linear(40, 10))
    x, y = matrix(40, 90), torch.arange(40) % 10
    gradients = gradients_for(model, cross_entropy, x[:4], y[:4]) if private else None
    bench = Workbench(model, parameters=None if gradients is None else gradients.parameters)
    step = DpSgdStep(PoissonSampling(0.5), FlatClipping(0.7), 1.0, 16.0) if private else None
    optimizer = SgdSettings(name="sgd", lr=0.1)
    local = LocalSettings(steps=2, batch_size=16, optimizer=optimizer)
    assert cohorts_agree(bench, cross_entropy, gradients, local, x, y, step)
