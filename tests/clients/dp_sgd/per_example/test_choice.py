"""Which way is chosen for a model: by layer, said once, never wrong."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.per_example.backend import BackendError, GradientMode, gradients_for
from fedsim.clients.dp_sgd.per_example.clipped_sum import (
    BookKeeping,
    LoopGradients,
    PerExampleGradients,
    VmapGradients,
)
from fedsim.clients.dp_sgd.per_example.module_use import UnitError
from fedsim.clients.dp_sgd.per_example.unit_layouts import possible_units


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).sum(1) - targets) ** 2


class Product(nn.Module):
    """x @ w: no rule of book-keeping's."""

    def __init__(self, inputs: int = 3, outputs: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class Attention(nn.Module):
    def __init__(self, *, batch_first: bool = True, masked: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(3, 4)
        self.mix = nn.MultiheadAttention(4, 2, batch_first=batch_first, dropout=0.0)
        self.out = nn.Linear(4, 1)
        self.masked, self.batch_first = masked, batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        mask = None
        if self.masked:
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        if not self.batch_first:
            x = x.transpose(0, 1)
        x, _ = self.mix(x, x, x, attn_mask=mask)
        return self.out(x if self.batch_first else x.transpose(0, 1)).squeeze(2)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).mean(1))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(3, 2), nn.Linear(3, 4), nn.Bilinear(2, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.one(x), torch.tanh(self.two(x)))


class OldWeightNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Tanh(), nn.utils.weight_norm(nn.Linear(3, 2)))


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product, self.out = Product(), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.product(torch.tanh(self.product(x))))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.layer(r) if r.sum().item() > 0 else -self.layer(r) for r in x]
        return torch.stack(rows)


class Positions(nn.Module):
    """A learnt position table looked up once for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.out = nn.Embedding(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.place(torch.arange(x.shape[1]))).squeeze(2)


class MeanTaken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x - x.mean(0)


class TimeFirst(nn.Module):
    """Lays out its examples second, so that a lot as long as the sequence could be mistaken."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(x.transpose(0, 1)))).transpose(0, 1).squeeze(2)


weight_norm = nn.utils.parametrizations.weight_norm
rows, sequences, images = (3,), (4, 3), (2, 5, 5)
UNITS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "product": (lambda: nn.Sequential(nn.Linear(3, 3), Product(), nn.Linear(3, 1)), rows, ["1"]),
    "products": (lambda: nn.Sequential(Product(), nn.Tanh(), Product()), sequences, ["0", "2"]),
    "reused": (Reused, rows, ["product"]),
    "inside": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), Product())),
        rows,
        ["1.1"],
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 1, 2)),
        images,
        ["0"],
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), weight_norm(nn.Linear(3, 2))),
        rows,
        ["2"],
    ),
    "old weight norm": (OldWeightNorm, rows, ["2"]),
    "attention": (Attention, sequences, ["mix"]),
    "masked attention": (lambda: Attention(masked=True), sequences, ["mix"]),
    "attention, time first": (lambda: Attention(batch_first=False), sequences, ["mix"]),
    "encoder": (Encoder, (5, 4), ["layer.self_attn"]),
    "bilinear": (Bilinear, rows, ["out"]),
}


def both(
    gradients: PerExampleGradients, x: Tensor, y: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    exact = LoopGradients(gradients.model, gradients.loss, parameters=gradients.parameters)
    sums = []
    clipping = FlatClipping(clip)
    for each in (exact, gradients):
        into = torch.zeros_like(exact.parameters.data)
        each.add_clipped_sum(x, y, clipping, clipping.groups(exact.parameters), into)
        sums.append(into)
    return sums[0], sums[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", UNITS)
def test_layers_without_a_rule_become_units(
    name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    make, shape, expected = UNITS[name]
    model = make().to(dtype)
    names = list(model.state_dict())
    gradients = gradients_for(model, squared, torch.randn(3, *shape).to(dtype), torch.randn(3))
    assert isinstance(gradients, BookKeeping)
    assert sorted(unit.name for unit in gradients.units) == sorted(expected)
    assert len(caplog.records) == 1
    assert all(repr(unit) in caplog.text for unit in expected)
    # Lots as long as sequences and masks: the examples' dimension is not guessed from its size.
    for n in (1, 4, 5):
        x, y = torch.randn(n, *shape).to(dtype), torch.randn(n).to(dtype)
        for clip in (float("inf"), 1.0):
            sums = both(gradients, x, y, clip)
            assert (sums[0] - sums[1]).norm() <= (
                (1e-10 if dtype == torch.float64 else 1e-4) * min(sums[0].norm().item(), 99.0)
            )
    assert list(model.state_dict()) == names
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_poisoned_example_stays_alone_in_a_unit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Product(), nn.Linear(3, 1))
    gradients = gradients_for(model, squared, torch.randn(3, 3), torch.randn(3))
    x, y = torch.randn(4, 3), torch.randn(4)
    into = [torch.zeros_like(gradients.parameters.data) for _ in range(2)]
    clipping = FlatClipping(0.5)
    groups = clipping.groups(gradients.parameters)
    gradients.add_clipped_sum(x[1:], y[1:], clipping, groups, into[0])
    x[0, 0] = float("nan")
    statistics = gradients.add_clipped_sum(x, y, clipping, groups, into[1])
    assert statistics.not_finite == 1
    torch.testing.assert_close(into[0], into[1])


def test_random_layers_inside_a_unit_draw_once() -> None:
    """Forward and gradient see the same mask."""

    class Dropped(Product):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(super().forward(x), 0.5, self.training)

    torch.manual_seed(0)
    model = nn.Sequential(Dropped(), nn.Linear(3, 1, bias=False))
    gradients = gradients_for(model, squared, torch.randn(3, 3), torch.zeros(3))
    assert isinstance(gradients, BookKeeping)
    model.train()
    with torch.no_grad():
        gradients.parameters.data.copy_(torch.ones_like(gradients.parameters.data))
    # With all ones, gradient of w[:, k] is x (a score of 1) or 0, as the mask says, for all rows;
    # that of the output weight k is 2 Σx or 0 by the same mask.
    gradients.loss = lambda outputs, targets: outputs.sum(1)
    found = gradients.gradients(torch.tensor([[1.0, 2.0, 3.0]] * 40), torch.zeros(40))
    inside, output = found[:, :9].view(40, 3, 3), found[:, 9:]
    assert torch.equal(inside[:, 0] > 0, output > 0)
    assert 0.2 < (output > 0).float().mean() < 0.8
    assert len(torch.unique(output > 0, dim=0)) > 1, "each example has a mask of its own"


@pytest.mark.parametrize(
    ("make", "shape", "kind"),
    [
        (lambda: nn.Linear(3, 1), rows, BookKeeping),
        (lambda: nn.Sequential(nn.LSTM(3, 2, batch_first=True), First()), sequences, BookKeeping),
        (
            lambda: nn.Sequential(nn.LSTM(3, 2, proj_size=1, batch_first=True), First()),
            sequences,
            LoopGradients,
        ),
        (Product, rows, VmapGradients),
        (Positions, sequences, VmapGradients),
        (TimeFirst, sequences, BookKeeping),
        (TimeFirst, (3, 3), VmapGradients),
        (TimeFirst, (2, 3), BookKeeping),
        (Branching, rows, LoopGradients),
    ],
)
def test_auto_takes_the_first_way_that_is_right(
    make: Callable[[], nn.Module], shape: tuple[int, ...], kind: type
) -> None:
    torch.manual_seed(0)
    gradients = gradients_for(make(), squared, torch.randn(3, *shape), torch.randn(3))
    assert type(gradients) is kind
    for n in (1, 3, 4):
        sums = both(gradients, torch.randn(n, *shape), torch.randn(n), 1.0)
        torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


class First(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        return pair[0]


@pytest.mark.parametrize("examples", [1, 2, 3, 9])
def test_any_number_of_public_examples_will_do(examples: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(examples, 3, 3)
    assert isinstance(gradients_for(model, squared, x, torch.randn(examples)), BookKeeping)
    with pytest.raises(ValueError, match="at least one public example"):
        gradients_for(model, squared, x[:0], torch.randn(0))


def test_a_way_may_be_asked_for() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 3), torch.randn(3)
    kinds: dict[GradientMode, type] = {
        "book_keeping": BookKeeping,
        "vmap": VmapGradients,
        "loop": LoopGradients,
        "auto": BookKeeping,
    }
    for mode, kind in kinds.items():
        assert type(gradients_for(nn.Linear(3, 1), squared, x, y, mode=mode)) is kind
    with pytest.raises(BackendError, match="no rule for how w is used"):
        gradients_for(Product(), squared, x, y, mode="book_keeping")
    with pytest.raises(BackendError, match="it fails with RuntimeError"):
        gradients_for(Branching(), squared, x, y, mode="vmap")


def test_book_keeping_is_never_used_where_examples_are_coupled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    x, y = torch.randn(3, 3), torch.randn(3)

    def centred(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze(1) - outputs.mean() - targets) ** 2

    class Norm(nn.Sequential):
        pass

    for model, loss in (
        (MeanTaken(), squared),
        (nn.Linear(3, 1), centred),
        (Norm(nn.Linear(3, 3), nn.BatchNorm1d(3)), squared),
    ):
        caplog.clear()
        assert not isinstance(gradients_for(model, loss, x, y), BookKeeping)
        assert "coupled" in caplog.text
        with pytest.raises(BackendError, match="coupled"):
            gradients_for(model, loss, x, y, mode="book_keeping")


def test_nothing_is_changed_by_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    gradients = gradients_for(model, squared, torch.ones(3, 3), torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == [True, True, False, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.untyped_storage().data_ptr() == (
            gradients.parameters.data.untyped_storage().data_ptr()
        )
    assert not caplog.records, "plain book-keeping is nothing to speak of"


def test_a_unit_called_in_another_way_is_refused() -> None:
    torch.manual_seed(0)

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product, self.out, self.twice = Product(), nn.Linear(3, 1), False

        def forward(self, x: Tensor) -> Tensor:
            x = self.product(x.repeat(2, 1))[: len(x)] if self.twice else self.product(x)
            return self.out(x)

    model = Changing()
    gradients = gradients_for(model, squared, torch.randn(3, 3), torch.randn(3))
    model.twice = True
    with pytest.raises(UnitError, match="other shapes than when it was tried"):
        both(gradients, torch.randn(4, 3), torch.randn(4), 1.0)
    assert "forward" not in vars(model.product)


def test_layouts_are_those_that_change_with_the_lot() -> None:
    model = Attention(batch_first=False, masked=True)
    x = torch.randn(4, 4, 3)
    units = possible_units(
        model, ["into", "mix", "mix.out_proj", "out"], lambda n: model(x[:n]), (4, 3)
    )
    assert units["mix"].inputs == (1, 1, 1, None)
    assert units["mix"].outputs == (1, 0)
    assert units["into"].inputs == (0,)
    assert "mix.out_proj" not in units, "never called as a module"


def test_flattened_examples_have_no_layout() -> None:
    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = Product()

        def forward(self, x: Tensor) -> Tensor:
            return self.product(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    model, x = Flattened(), torch.randn(4, 4, 3)
    assert not possible_units(model, ["product"], lambda n: model(x[:n]), (4, 3))
    gradients = gradients_for(model, squared, x, torch.randn(4))
    assert type(gradients) is VmapGradients


def test_a_vmapped_lot_is_cut_to_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim.clients.dp_sgd.per_example import alone

    torch.manual_seed(0)
    gradients = VmapGradients(nn.Linear(3, 2), squared)
    monkeypatch.setattr(alone, "_HELD", 20)  # two examples of 8
    sizes = []
    original = gradients._by_parameter

    def watched(x: Tensor, y: Tensor) -> list[Tensor]:
        sizes.append(len(x))
        return original(x, y)

    monkeypatch.setattr(gradients, "_by_parameter", watched)
    sums = both(gradients, torch.randn(5, 3), torch.randn(5), 1.0)
    assert sizes == [2, 2, 1]
    torch.testing.assert_close(*sums)
