"""Which way is chosen for a model: rules, torch.func where they end; never wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.gradients.choice import BackendError, gradients_for, training_gradients
from fedsim.clients.gradients.per_example import (
    BatchStatistics,
    OneAtATime,
    PerExampleGradients,
    PerExampleLoss,
)
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.models.losses import cross_entropy


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).sum(1) - targets) ** 2


class Product(nn.Module):
    """x @ w: no rule."""

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
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).mean(1))


class EncoderOfPlaces(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places)


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
    """Lays out its examples second, so that a batch as long as the sequence could be mistaken."""

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
    "masked attention": (lambda: Attention(masked=True), (6, 3), ["mix"]),
    "masked attention as long as what is tried": (
        lambda: Attention(masked=True),
        sequences,
        [""],
    ),
    "attention, time first": (lambda: Attention(batch_first=False), sequences, [""]),
    "encoder": (Encoder, (5, 4), ["layer.self_attn"]),
    "encoder of places": (EncoderOfPlaces, (5, 4), [""]),
    "bilinear": (Bilinear, rows, ["out"]),
}


Both = Callable[[PerExampleGradients, Tensor, Tensor, float], tuple[Tensor, Tensor]]


@pytest.fixture(scope="session")
def both(add_clipped_sum: Callable[..., BatchStatistics]) -> Both:
    """The sum of clipped gradients, by one example at a time and by another way."""

    def add(
        gradients: PerExampleGradients, x: Tensor, y: Tensor, clip: float
    ) -> tuple[Tensor, Tensor]:
        exact = OneAtATime(gradients.model, gradients.loss, parameters=gradients.parameters)
        sums = []
        clipping = FlatClipping(clip)
        for each in (exact, gradients):
            into = torch.zeros_like(exact.parameters.data, dtype=torch.float64)
            add_clipped_sum(each, x, y, clipping, clipping.groups(exact.parameters), into)
            sums.append(into)
        return sums[0], sums[1]

    return add


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in UNITS), ("inside", torch.float32)],
)
def test_what_has_no_rule_becomes_units(
    name: str, dtype: torch.dtype, logged: Any, both: Both
) -> None:
    torch.manual_seed(0)
    make, shape, expected = UNITS[name]
    model = make().to(dtype)
    names = list(model.state_dict())
    gradients = gradients_for(model, squared, torch.randn(3, *shape).to(dtype), torch.randn(3))
    assert isinstance(gradients, RuleGradients)
    assert sorted(gradients.units) == sorted(expected)
    assert len(logged.records) == 1
    assert all((repr(unit) if unit else "the whole model") in logged.text for unit in expected)
    # Batches as long as sequences and masks: the examples' dimension is not guessed from its size.
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for n, clip in ((1, 1.0), (4, 1.0), (5, float("inf")), (6, 1.0)):
        x, y = torch.randn(n, *shape).to(dtype), torch.randn(n).to(dtype)
        sums = both(gradients, x, y, clip)
        assert (sums[0] - sums[1]).norm() <= tolerance * min(sums[0].norm().item(), 99.0)
    assert list(model.state_dict()) == names
    assert all("forward" not in vars(module) for module in model.modules())
    check_clients(gradients, torch.randn(6, *shape).to(dtype), torch.randn(6).to(dtype), tolerance)


def check_clients(gradients: RuleGradients, x: Tensor, y: Tensor, tolerance: float) -> None:
    """The gradients of three clients' rows, each with parameters of its own, are those alone."""
    assert gradients.stacks
    data = gradients.parameters.data
    values = data + 0.1 * torch.randn(3, len(data)).to(data)
    found = gradients.gradients(x, y, values)
    exact = OneAtATime(gradients.model, squared, parameters=gradients.parameters)
    for k in range(3):
        data.copy_(values[k])
        own = slice(2 * k, 2 * k + 2)
        expected = exact.gradients(x[own], y[own])
        assert (found[own] - expected).norm() <= tolerance * expected.norm()


def test_a_poisoned_example_stays_alone_in_a_unit(
    add_clipped_sum: Callable[..., BatchStatistics],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Product(), nn.Linear(3, 1))
    gradients = gradients_for(model, squared, torch.randn(3, 3), torch.randn(3))
    x, y = torch.randn(4, 3), torch.randn(4)
    like = gradients.parameters.data
    into = [torch.zeros_like(like, dtype=torch.float64) for _ in range(2)]
    clipping = FlatClipping(0.5)
    groups = clipping.groups(gradients.parameters)
    add_clipped_sum(gradients, x[1:], y[1:], clipping, groups, into[0])
    x[0, 0] = float("nan")
    statistics = add_clipped_sum(gradients, x, y, clipping, groups, into[1])
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
    assert isinstance(gradients, RuleGradients)
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


def test_attention_with_dropout_trains_in_a_unit() -> None:
    torch.manual_seed(0)
    gradients = gradients_for(Encoder(dropout=0.5), squared, torch.randn(3, 5, 4), torch.randn(3))
    assert isinstance(gradients, RuleGradients)
    gradients.model.train()
    found = gradients.gradients(torch.ones(4, 5, 4), torch.zeros(4))
    assert len(torch.unique(found, dim=0)) == 4, "each example has a mask of its own"


class Flattened(nn.Module):
    """Runs a layer on all places of all examples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.out = Product(), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.product(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


class Outer(nn.Module):
    """Something that works with its surroundings only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Flattened(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x).squeeze(2))


@pytest.mark.parametrize(
    ("make", "shape", "units"),
    [
        (lambda: nn.Linear(3, 1), rows, []),
        (lambda: nn.Sequential(nn.LSTM(3, 2, batch_first=True), First()), sequences, []),
        (
            lambda: nn.Sequential(nn.LSTM(3, 2, proj_size=1, batch_first=True), First()),
            sequences,
            None,
        ),
        (Product, rows, [""]),
        (Positions, sequences, [""]),
        (TimeFirst, sequences, [""]),
        (TimeFirst, (3, 3), [""]),
        (TimeFirst, (2, 3), [""]),
        (Flattened, sequences, [""]),
        (Outer, sequences, ["inner"]),
        (Branching, rows, None),
    ],
)
def test_a_wrong_module_is_widened_to_its_surroundings_and_at_last_to_the_loop(
    make: Callable[[], nn.Module], shape: tuple[int, ...], units: list[str] | None, both: Both
) -> None:
    """Whatever is chosen is right, for batches of any size; None: one example at a time."""
    torch.manual_seed(0)
    gradients = gradients_for(make(), squared, torch.randn(3, *shape), torch.randn(3))
    if units is None:
        assert type(gradients) is OneAtATime
        assert not gradients.stacks
    else:
        assert isinstance(gradients, RuleGradients)
        assert list(gradients.units) == units
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
    assert isinstance(gradients_for(model, squared, x, torch.randn(examples)), RuleGradients)
    with pytest.raises(ValueError, match="at least one public example"):
        gradients_for(model, squared, x[:0], torch.randn(0))


def test_rules_may_be_required() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 3), torch.randn(3)
    model = nn.Linear(3, 1)
    assert type(gradients_for(model, squared, x, y, rules_only=True)) is RuleGradients
    with pytest.raises(BackendError, match="it fails with RuntimeError"):
        gradients_for(Branching(), squared, x, y, rules_only=True)


def test_rules_are_never_used_where_examples_are_coupled(
    logged: Any,
) -> None:
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
        logged.records.clear()
        assert not isinstance(gradients_for(model, loss, x, y), RuleGradients)
        assert "coupled" in logged.text
        with pytest.raises(BackendError, match="coupled"):
            gradients_for(model, loss, x, y, rules_only=True)


def test_nothing_is_changed_by_the_choice(logged: Any) -> None:
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
    assert not logged.records, "plain rules are nothing to speak of"


class Grown(nn.Module):
    """Changes what it does after it was tried."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.out, self.twice = Product(), nn.Linear(3, 1), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.product(x.repeat(2, 1))[: len(x)] if self.twice else self.product(x)
        return self.out(x)


def test_a_unit_called_in_another_way_is_refused(both: Both) -> None:
    torch.manual_seed(0)
    model = Grown()
    gradients = gradients_for(model, squared, torch.randn(3, 3), torch.randn(3))
    model.twice = True
    with pytest.raises(RuntimeError, match="no input with one row per example"):
        both(gradients, torch.randn(4, 3), torch.randn(4), 1.0)
    assert "forward" not in vars(model.product)


def test_models_that_draw_random_numbers_train_one_client_at_a_time() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 3), torch.randn(3)
    for dropout, stacks in ((0.0, True), (0.5, False)):
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 1))
        assert gradients_for(model, squared, x, y).stacks is stacks


class Shifted(nn.Module):
    """Its own parameters enter where no rule sees them: the same for all clients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.layer.weight.detach().abs().sum()


def test_models_that_read_their_parameters_train_one_client_at_a_time() -> None:
    torch.manual_seed(0)
    gradients = gradients_for(Shifted(), squared, torch.randn(3, 3), torch.randn(3))
    assert isinstance(gradients, RuleGradients)
    assert not gradients.stacks


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), True),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), False),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), False),
        (lambda: nn.Sequential(Product(), nn.Linear(3, 2)), False),
        (MeanTaken, False),
    ],
)
def test_without_privacy_rules_are_for_models_that_stack_and_torch_for_the_rest(
    make: Callable[[], nn.Module], rules: bool
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 3), torch.tensor([0, 1, 1])
    found = training_gradients(make(), cross_entropy, x, y, private=False)
    assert (found is not None) is rules
    assert found is None or found.stacks


def tied() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def changed() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.forward = lambda input: functional.linear(2 * input, layer.weight, layer.bias)
    return nn.Sequential(nn.Linear(3, 3), layer)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (tied, True),
        (changed, False),
        (lambda: nn.Sequential(nn.Linear(3, 3), Doubled(3, 2)), False),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(inplace=True), nn.Linear(3, 2)), True),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.ELU(inplace=True), nn.Linear(3, 2)), True),
        (lambda: nn.Sequential(nn.Linear(3, 3), weight_norm(nn.Linear(3, 2))), False),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), Product(3, 2))), False),
    ],
)
def test_sequences_are_right_with_losses_that_know_their_gradient_and_without(
    make: Callable[[], nn.Module], plain: bool, both: Both
) -> None:
    """Run by hand or by autograd; `plain`: the rules cover all of it."""

    def by_autograd(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")

    torch.manual_seed(0)
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    losses: tuple[PerExampleLoss, ...] = (cross_entropy, by_autograd)
    gradients = gradients_for(make(), cross_entropy, x, y)
    for gradients.loss, clip in zip(losses, (0.5, float("inf")), strict=True):
        torch.testing.assert_close(*both(gradients, x, y, clip), rtol=1e-4, atol=1e-6)
    if plain:
        assert isinstance(gradients, RuleGradients)
        assert not gradients.units
