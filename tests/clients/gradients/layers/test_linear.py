"""Linear layers: norms are never too small, hardly too large, and cost little memory."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedsim.clients.gradients.layers import linear
from fedsim.clients.gradients.layers.base import (
    Operand,
    row_norms,
    squared_norms,
    squares,
    zero_rows,
)
from fedsim.clients.gradients.layers.linear import LinearUse

values = st.floats(-1, 1, width=32)
magnitudes = st.sampled_from([1e-38, 1e-30, 1e-20, 1e-8, 1.0, 1e8, 1e20, 1e30])


@pytest.fixture(params=["held", "gram", "blocks"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces each of the three ways to the norm of a linear layer on sequences."""
    if request.param != "held":
        monkeypatch.setattr(LinearUse, "_is_little", False)
    if request.param == "blocks":
        monkeypatch.setattr(linear, "BUDGET", 100)
        monkeypatch.setattr(linear, "_is_short", lambda a, g: False)
    if request.param == "gram":
        monkeypatch.setattr(linear, "_is_short", lambda a, g: True)
    return request.param


def linear_use(a: Tensor, g: Tensor) -> LinearUse:
    w = torch.empty(1, g.shape[-1], a.shape[-1], dtype=a.dtype)
    use = LinearUse(Operand(w, 0), Operand(w[:, :, 0], 1))
    use.input, use.output_gradient = a, g
    return use


def released(use: LinearUse, index: int, i: int) -> Tensor:
    """What example i alone adds, as float64."""
    n = len(use.input)
    shape = use.output_gradient.shape[-1], *(use.input.shape[-1:] if index == 0 else ())
    into, factors = torch.zeros(1, *shape).double(), torch.zeros(n).double()
    factors[i] = 1.0
    use.add_weighted(index, factors.unsqueeze(0), into)
    return into


@pytest.mark.parametrize(("clients", "dtype"), [(1, torch.float64), (3, torch.float32)])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
def test_linear_layers_are_torchs(
    check_rule: Callable[..., None],
    path: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    clients: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * clients, *shape, 6, generator=generator).double()
    options = {"clients": clients, "dtype": dtype}
    check_rule(LinearUse, functional.linear, x, [(5, 6), (5,)], **options)
    check_rule(lambda w: LinearUse(w, None), functional.linear, x, [(5, 6)], **options)
    for trained in ((True, False), (False, True)):
        check_rule(LinearUse, functional.linear, x, [(5, 6), (5,)], trained=trained, **options)


@pytest.mark.parametrize("clients", [1, 3])
def test_large_weights_are_added_where_they_lie(
    check_rule: Callable[..., None], clients: int
) -> None:
    x = torch.randn(2 * clients, 100, generator=torch.Generator().manual_seed(2)).double()
    check_rule(LinearUse, functional.linear, x, [(90, 100), (90,)], clients=clients)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=6), magnitudes, st.booleans())
def test_squares_are_right_for_all_sizes(row: list[float], size: float, long: bool) -> None:
    x = torch.tensor([row, row[::-1]]) * size
    if long:
        x = x.repeat(30, 64 * 40)[:, : 64 * 40]
    exact = x.double().square().sum(1)
    found = squares(x)
    assert (found >= exact * (1 - 1e-12)).all()
    least = 2.0**-62 * x.shape[1] ** 0.5  # squares below it may underflow
    assert (found <= (exact.sqrt() * (1 + 4e-5) + least).square()).all()


def test_norms_in_float32_stay_above_the_exact_norm() -> None:
    """Values of which each square and each partial sum is rounded down as far as possible."""
    torch.manual_seed(0)
    for size in (1, 63, 64, 65, 1000, 4096):
        x = torch.rand(2000, size) * 2.0**-20 + 1.0
        exact = x.double().square().sum(1)
        assert (squares(x) >= exact).all()
        assert squares(x).sqrt().div(exact.sqrt()).max() < 1 + 4e-5


def test_a_norm_depends_on_its_row_alone() -> None:
    x = torch.randn(48, 300)
    before = row_norms(x)
    x[7], x[9], x[11] = 1e30, float("nan"), 1e-30
    kept = [i for i in range(48) if i not in (7, 9, 11)]
    assert torch.equal(row_norms(x)[kept], before[kept])


@pytest.mark.parametrize("size", [1.0, 1e12])
def test_a_norm_does_not_depend_on_the_other_layers_of_the_pass(size: float) -> None:
    """Another example may decide which layers are called, as with a head for some labels."""
    small = linear_use(torch.randn(6, 1, 20), torch.randn(6, 1, 5))
    wide = LinearUse(Operand(torch.empty(1, 700, 3000), 1), None)
    wide.input, wide.output_gradient = torch.randn(6, 3000) * size, torch.zeros(6, 700)
    alone = squared_norms({0: small})[0]
    assert torch.equal(squared_norms({0: small, 1: wide})[0], alone)


def test_squares_of_rows_that_are_not_finite_are_not() -> None:
    x = torch.ones(4, 4096)
    x[0, 5], x[1, 6], x[2, 7] = float("nan"), float("inf"), -float("inf")
    for width in (4096, 10):
        assert torch.isfinite(squares(x[:, :width])).tolist() == [False, False, False, True]
    assert squares(torch.empty(2, 0)).tolist() == [0.0, 0.0]
    assert squares(torch.tensor([3.0, -2.0])).tolist() == pytest.approx([9.0, 4.0], rel=1e-5)


def test_dropped_rows_become_zero_whatever_they_hold() -> None:
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [3.0, 4.0]])
    dropped = torch.tensor([True, True, False])
    assert zero_rows(x, dropped).tolist() == [[0, 0], [0, 0], [3, 4]]


def attack(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A sequence whose Gram terms cancel in float32 while its gradient is large (reference, 3).

    g alternates in sign and is huge, a hardly changes: the true gradient is Σ ± a_t g.
    """
    torch.manual_seed(seed)
    base = torch.randn(1, 1, 8) * 1e4
    a = base + torch.randn(1, length, 8) * 0.3
    signs = torch.tensor([1.0, -1.0]).repeat(length // 2).view(1, length, 1)
    return a, signs * torch.ones(1, length, 6) * 1e2


@pytest.mark.parametrize("length", [2, 8, 64])
def test_cancellation_never_hides_a_large_gradient(path: str, length: int) -> None:
    a, g = attack(length)
    exact = (g.double().transpose(1, 2) @ a.double()).flatten(1).norm(dim=1)
    float32_gram = ((a @ a.transpose(1, 2)) * (g @ g.transpose(1, 2))).sum((1, 2)).clamp(min=0)
    assert abs(float32_gram.sqrt() / exact - 1) > 0.01, "the attack must work on a naive engine"
    use = linear_use(a, g)
    norm = squared_norms({0: use})[0].sqrt()
    assert norm >= released(use, 0, 0).norm() * (1 - 1e-9)
    if path != "held":
        assert norm >= exact * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_cancellation_in_float64_hides_nothing_either(path: str, seed: int) -> None:
    """Whole numbers, so that the exact gradient is known: large terms cancel to small ones."""
    generator = torch.Generator().manual_seed(seed)
    a = 10**9 + torch.randint(-3, 4, (1, 8, 5), generator=generator)
    g = torch.randint(1, 4, (1, 1, 4), generator=generator).expand(1, 8, 4) * 1
    g[:, 1::2] *= -1
    exact = torch.einsum("ntp,ntd->npd", g, a).double().flatten(1).norm(dim=1)
    use = linear_use(a.double(), g.double())
    assert (squared_norms({0: use})[0].sqrt() >= exact * (1 - 1e-12)).all()


@pytest.mark.parametrize("length", [2, 6, 32])
def test_what_rounding_makes_of_zero_is_covered(path: str, length: int) -> None:
    """The true gradient is 0, the float32 sum that is released is not."""
    torch.manual_seed(1)
    half_a, half_g = torch.randn(1, length // 2, 5) * 1e9, torch.randn(1, length // 2, 4) * 1e9
    order = torch.randperm(length)
    a = torch.cat([half_a, half_a], 1)[:, order]
    g = torch.cat([half_g, -half_g], 1)[:, order]
    others = torch.randn(9, length, 5), torch.randn(9, length, 4)
    use = linear_use(torch.cat([a, others[0]]), torch.cat([g, others[1]]))
    for index in (0, 1):
        norm = squared_norms({index: use})[index].sqrt()[0]
        assert norm >= released(use, index, 0).norm() * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 40),
    st.integers(0, 10**6),
    st.sampled_from([1e-15, 1e-4, 1.0, 1e5, 1e14]),
    st.sampled_from([0.0, 1e-7, 1e-4, 1e-2, 1.0]),
)
def test_norms_are_never_below_what_is_released(
    length: int, seed: int, size: float, apart: float
) -> None:
    """Sequences whose terms cancel down to a part of `apart`, on each path."""
    torch.manual_seed(seed)
    a = torch.randn(3, 1, 6) + apart * torch.randn(3, length, 6)
    g = torch.randn(3, length, 5)
    g[:, -1] = -g[:, :-1].sum(1) * (1 - apart)
    a = a * size
    exact = (g.double().transpose(1, 2) @ a.double()).flatten(1).norm(dim=1)
    use = linear_use(a, g)
    not_held = linear._sequence_squares(a, g).sqrt()
    assert (not_held >= exact * (1 - 1e-12)).all()
    for i in range(3):
        assert not_held[i] >= released(use, 0, i).norm() * (1 - 1e-9)
    norms = squared_norms({0: use})[0].sqrt()  # from now on the gradients are held
    for i in range(3):
        assert norms[i] >= released(use, 0, i).norm() * (1 - 1e-9)


@pytest.mark.parametrize(("n", "length"), [(64, 196), (8, 16), (256, 4), (2, 2000)])
def test_the_slack_for_rounding_is_small(path: str, n: int, length: int) -> None:
    """Random sequences, whose terms cancel down to a part of 1/√t: hardly clipped too much."""
    torch.manual_seed(2)
    a, g = torch.randn(n, length, 40), torch.randn(n, length, 30)
    exact = (g.double().transpose(1, 2) @ a.double()).flatten(1).norm(dim=1)
    excess = squared_norms({0: linear_use(a, g)})[0].sqrt() / exact - 1
    assert excess.max() < (4e-5 if path == "held" else 2e-2)


def test_the_paths_agree_in_float64(path: str) -> None:
    torch.manual_seed(3)
    a, g = torch.randn(4, 5, 7).double(), torch.randn(4, 5, 3).double()
    exact = (g.transpose(1, 2) @ a).flatten(1)
    use = linear_use(a, g)
    torch.testing.assert_close(
        squared_norms({0: use})[0], exact.square().sum(1), rtol=1e-10, atol=0
    )
    into = torch.zeros(1, 3, 7).double()
    factors = torch.rand(4).double()
    use.add_weighted(0, factors.unsqueeze(0), into)
    torch.testing.assert_close(into, (factors @ exact).view(1, 3, 7))


def test_joined_uses_are_one_sequence() -> None:
    torch.manual_seed(4)
    parts = [(torch.randn(3, 4), torch.randn(3, 2)), (torch.randn(3, 5, 4), torch.randn(3, 5, 2))]
    whole = LinearUse.joined([linear_use(*part) for part in parts])
    for index in (0, 1):
        expected = sum(linear_use(*part).per_example(index) for part in parts)
        torch.testing.assert_close(whole.per_example(index), expected)
