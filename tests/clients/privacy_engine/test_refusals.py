"""What the facade refuses, because the account would not hold for it."""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedsim.clients import PrivacyEngine
from fedsim.clients.gradients.per_example import UncoveredParameterError
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.privacy_engine.batch_schedule import EpochError
from fedsim.clients.privacy_engine.outside_batches import (
    FALSE_ALARM_PROBABILITY,
    BatchSizes,
    NotPoissonError,
    OutsideBatchError,
    chance_of_repeats,
    size_probabilities,
)
from fedsim.clients.privacy_engine.recorded_pass import BackwardError


class Two(nn.Module):
    """A model whose submodule may be called on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def attached(model: nn.Module | None = None, **settings: Any) -> tuple[Any, Any, PrivacyEngine]:
    model = Two() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen: dict[str, Any] = {"batch_size": 8, "sample_size": 40, "noise_multiplier": 1.0}
    engine = PrivacyEngine(model, **(chosen | settings))
    return model, optimizer, engine.attach(optimizer)


X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.arange(8) % 2


def loss(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> Tensor:
    return functional.cross_entropy(model(x), y)


# --- gradients that cannot be told apart -------------------------------------------------------


def test_one_backward_through_two_forwards_is_refused() -> None:
    model, optimizer, engine = attached()
    (loss(model) + loss(model, X[:3], Y[:3])).backward()
    with pytest.raises(
        BackwardError, match=r"2 forward passes \(\d and \d examples\).*virtual_step"
    ):
        optimizer.step()
    assert engine.steps == 0
    optimizer.zero_grad()
    optimizer.step()
    assert engine.steps == 1


def test_gradients_accumulate_only_by_virtual_step() -> None:
    model, optimizer, _ = attached()
    loss(model).backward()
    loss(model).backward()
    with pytest.raises(BackwardError, match="2 forward passes"):
        optimizer.virtual_step()


def test_forwards_may_interleave_and_may_lack_a_backward() -> None:
    gradients = []
    for others in (False, True):
        model, optimizer, _ = attached(noise_multiplier=0.0, max_grad_norm=0.1, batch_size=40)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
            if others:
                model(X * 7)
        if others:
            model(X * 3)
        first = loss(model)
        second = loss(model, X[:3] * 2, Y[:3]) if others else None
        optimizer.zero_grad()  # between forward and backward it drops nothing
        first.backward()
        optimizer.virtual_step()
        if second is not None:
            second.backward()
            optimizer.zero_grad()
        optimizer.step()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[0].norm() > 0


def test_running_backward_twice_is_refused() -> None:
    model, optimizer, engine = attached()
    value = loss(model)
    value.backward(retain_graph=True)
    value.backward()
    with pytest.raises(BackwardError, match="twice through one forward"):
        optimizer.step()
    value = loss(model)
    value.backward(retain_graph=True)
    optimizer.virtual_step()
    with pytest.raises(BackwardError, match="would count twice"):
        value.backward()
    optimizer.step()
    assert engine.steps == 1


def test_two_losses_on_different_heads_are_one_gradient() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(x)

    released = []
    for at_once in (True, False):
        torch.manual_seed(0)
        model, optimizer, _ = attached(Heads(), noise_multiplier=0.0, max_grad_norm=0.3)
        one, two = model(X)
        if at_once:
            (one.mean() + two.mean()).backward()
        else:
            one.mean().backward()
            two.mean().backward()
        optimizer.step()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(released[0], released[1])


@pytest.mark.parametrize("way", ["submodule", "penalty", "before attach"])
def test_gradients_from_outside_the_forward_are_refused(way: str) -> None:
    model = Two()
    early = loss(model)
    model, _, _ = attached(model)
    outside = {
        "submodule": lambda: functional.cross_entropy(model.head(model.body(X)), Y),
        "penalty": lambda: loss(model) + model.head.weight.square().sum(),
        "before attach": lambda: early,
    }[way]
    with pytest.raises(BackwardError, match=r"got a gradient outside .*weight_decay"):
        outside().backward()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_gradients_are_refused() -> None:
    model, _, _ = attached()
    x = X.clone().requires_grad_()
    (inner,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        inner.square().sum().backward()


def test_adversarial_examples_need_a_zero_grad() -> None:
    model, optimizer, engine = attached()
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(model, x), x)
    optimizer.zero_grad()
    loss(model, X + 0.1 * gradient.sign()).backward()
    optimizer.step()
    assert engine.steps == 1


def test_closures_are_refused() -> None:
    model, optimizer, engine = attached()
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: loss(model))
    assert engine.steps == 0
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        PrivacyEngine(model, batch_size=8, sample_size=40, noise_multiplier=1.0).attach(
            torch.optim.LBFGS(model.parameters())
        )


# --- models ------------------------------------------------------------------------------------


def test_parameters_without_a_rule_are_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.power = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            outputs = self.linear(x).abs()
            return outputs**self.power if outputs.sum().item() else outputs  # no row by itself

    model, _, _ = attached(Odd())
    with pytest.raises(UncoveredParameterError, match=r"parameters have no rule|fails with.*item"):
        model(X)
    model.eval()
    with torch.no_grad():
        model(X)


class Demanding(nn.Linear):
    """Takes numbers above 2 only."""

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() and input.min() <= 2.0:
            raise ValueError("give me more")
        return super().forward(input)


def test_a_model_that_needs_real_examples_is_checked_on_public_ones() -> None:
    model, optimizer, engine = attached(Demanding(4, 2))
    with pytest.raises(ValueError, match=r"shape \(4,\) .*give me more.*engine\.check_model"):
        model(X + 5)
    # The check tries large negative values too, which this model refuses whatever the examples.
    with pytest.raises(ValueError, match="give me more"):
        engine.check_model(X + 5)
    optimizer.step()


def test_batch_normalisation_is_refused_and_nothing_is_changed() -> None:
    frozen = nn.Dropout(0.5).eval()
    model = nn.Sequential(nn.Linear(4, 3), frozen, nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, _, _ = attached(model)
    with pytest.raises(UnsafeModelError, match="BatchNorm1d"):
        model(X)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert not frozen.training


def test_buffers_that_change_are_refused() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, input: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(input)

    model, _, _ = attached(Counting())
    with pytest.raises(UnsafeModelError, match="buffer 'seen' changes"):
        model(X)
    assert model.seen == 0


@pytest.mark.parametrize("arguments", [1, 2])
def test_models_that_mix_examples_are_refused(arguments: int) -> None:
    class Mixing(nn.Linear):
        def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
            return super().forward(input - input.mean(0))

    model, _, _ = attached(Mixing(4, 2))
    with pytest.raises(UnsafeModelError, match="example 1 is coupled to example 0"):
        model(*[X] * arguments)


def test_a_loss_that_couples_examples_is_found_by_the_check() -> None:
    model, optimizer, engine = attached()
    engine.check_isolation(nn.CrossEntropyLoss(reduction="none"), X, Y)
    engine.check_isolation(nn.CrossEntropyLoss(), X, Y)
    ignoring = nn.CrossEntropyLoss(ignore_index=1)
    with pytest.raises(UnsafeModelError, match="is coupled to example"):
        engine.check_isolation(ignoring, X, Y)
    loss(model).backward()
    optimizer.step()  # the check has left no gradients


def test_outputs_need_a_row_for_each_example() -> None:
    class Total(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).mean()

    model, _, _ = attached(Total(4, 2))
    with pytest.raises(UnsafeModelError, match="no row for each example"):
        model(X)


def test_several_and_nested_inputs_are_checked_and_trained() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(5, 3), nn.Linear(4, 3)

        def forward(self, batch: dict[str, Tensor], *, scale: float) -> Tensor:
            return self.table(batch["word"]) + self.linear(batch["x"]) * scale

    state = torch.get_rng_state()
    model, optimizer, engine = attached(Sum())
    torch.set_rng_state(state)
    functional.cross_entropy(model({"word": Y, "x": X}, scale=2.0), Y).backward()
    assert torch.equal(state, torch.get_rng_state()), "checks must not touch torch's own generator"
    optimizer.step()
    assert engine.private_statistics is not None
    assert engine.private_statistics.examples == 8
    with pytest.raises(TypeError, match="first dimension is the examples"):
        model({}, scale=1.0)


def test_the_first_batch_may_be_empty() -> None:
    model, optimizer, engine = attached()
    loss(model, X[:0], Y[:0]).backward()
    optimizer.step()
    assert engine.steps == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


# --- optimizers --------------------------------------------------------------------------------


def wrong_optimizers() -> Iterator[tuple[str, Any, str]]:
    yield "lacks", lambda m: m.head.parameters(), "lacks body.weight, body.bias"
    yield "besides", lambda m: [*m.parameters(), nn.Parameter(torch.ones(7))], r"shape \(7,\)"
    yield "other model", lambda m: Two().parameters(), "lacks body.weight"


@pytest.mark.parametrize(("_", "choose", "message"), list(wrong_optimizers()))
def test_an_optimizer_of_other_parameters_is_refused(_: str, choose: Any, message: str) -> None:
    model = Two()
    engine = PrivacyEngine(model, batch_size=8, sample_size=40, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=message):
        engine.attach(torch.optim.SGD(choose(model), lr=0.1))
    assert "forward" not in model.__dict__


def test_frozen_parameters_do_not_belong_in_the_optimizer() -> None:
    model = Two()
    model.body.requires_grad_(False)
    engine = PrivacyEngine(model, batch_size=8, sample_size=40, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"it has body\.weight, body\.bias besides"):
        engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_parameters_may_not_change_while_attached() -> None:
    model, optimizer, engine = attached()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        optimizer.step()
    del optimizer.param_groups[1]
    model.body.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of body\.weight changed"):
        optimizer.step()
    assert engine.steps == 0
    assert not len(engine.ledger)


def test_attaching_twice_is_refused() -> None:
    model, optimizer, engine = attached()
    with pytest.raises(ValueError, match="attached to an optimizer already"):
        engine.attach(optimizer)
    other = PrivacyEngine(model, batch_size=8, sample_size=40, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="optimizer has a privacy engine already"):
        other.attach(optimizer)
    with pytest.raises(ValueError, match="model is attached to a privacy engine already"):
        other.attach(torch.optim.SGD(model.parameters(), lr=0.1))


# --- batches --------------------------------------------------------------------------------------


def test_a_shuffled_loader_is_not_poisson() -> None:
    model, optimizer, engine = attached(batch_size=32, sample_size=1000, batches="poisson")
    x, y = torch.randn(1000, 4), torch.randint(0, 2, (1000,))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

    def epoch() -> None:
        for a, b in loader:
            loss(model, a, b).backward()
            optimizer.step()

    with pytest.raises(NotPoissonError, match=r"32 examples each.*sampling='shuffle'"):
        epoch()
    assert 5 < engine.steps < 15
    for ask in (engine.get_epsilon, engine.get_privacy_spent, lambda: engine.remaining(9.0)):
        with pytest.raises(NotPoissonError):
            ask()
    with pytest.raises(NotPoissonError):
        optimizer.step()
    *_, resumed = attached(batch_size=32, sample_size=1000, batches="poisson")
    resumed.load_state_dict(engine.state_dict())
    with pytest.raises(NotPoissonError):
        resumed.get_epsilon()


def test_batches_larger_than_declared_are_not_poisson() -> None:
    model, optimizer, engine = attached(batch_size=8, sample_size=1000, batches="poisson")
    draw = np.random.default_rng(0)

    def train() -> None:
        for _ in range(20):
            chosen = torch.from_numpy(np.flatnonzero(draw.random(1000) < 0.03))
            loss(model, torch.ones(len(chosen), 4), chosen % 2).backward()
            optimizer.step()

    with pytest.raises(NotPoissonError, match="Declare the batch_size"):
        train()
    assert engine.steps < 10


def see_all(sizes: BatchSizes, seen: Iterable[int]) -> int:
    """Return which batch is refused, 0 if none is."""
    for count, size in enumerate(seen, 1):
        try:
            sizes.add_size(size)
        except NotPoissonError:
            return count
    return 0


def test_how_soon_equal_batches_are_noticed() -> None:
    for size, population in ((32, 1000), (64, 60_000), (3, 10), (1, 100)):
        count = see_all(BatchSizes(population, size / population), [size] * 500)
        probabilities = size_probabilities(population, size / population)
        assert probabilities.sum() == pytest.approx(1.0)
        assert 0 < count <= 64
        # The chance that all batches have one size, to which the bound is exact.
        exact = (probabilities**count).sum()
        assert chance_of_repeats(probabilities, count, count) == pytest.approx(exact)
        assert exact < FALSE_ALARM_PROBABILITY


def test_a_short_last_batch_does_not_hide_a_shuffle() -> None:
    assert see_all(BatchSizes(10, 0.4), [4, 4, 2] * 200)


def test_full_batches_and_poisson_batches_pass() -> None:
    draw = np.random.default_rng(1)
    for population, rate in ((40, 0.2), (1000, 0.032), (5, 0.01), (60_000, 0.001)):
        assert not see_all(BatchSizes(population, rate), draw.binomial(population, rate, 2000))
    assert not see_all(BatchSizes(40, 1.0), [40] * 100)


def test_shuffled_batches_from_outside_need_their_epochs() -> None:
    model, optimizer, engine = attached(sampling="shuffle", batch_size=8, sample_size=20)
    loader = DataLoader(TensorDataset(torch.randn(20, 4), torch.arange(20) % 2), batch_size=8)
    with pytest.raises(EpochError, match=r"call engine\.begin_epoch\(\)"):
        optimizer.step()
    for _ in range(2):
        engine.begin_epoch()
        for a, b in loader:
            loss(model, a, b).backward()
            optimizer.step()
    assert [count for _, count in engine.ledger.entries] == [2]
    with pytest.raises(EpochError, match="belongs to no pass"):
        optimizer.step()
    engine.begin_epoch()
    loss(model, torch.randn(16, 4), torch.arange(16) % 2).backward()
    with pytest.raises(OutsideBatchError, match=r"16 examples .*of batch_size=8"):
        optimizer.step()
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
    loss(model).backward()
    with pytest.raises(EpochError, match="24 examples in one pass, of sample_size=20"):
        optimizer.step()


def test_two_shuffles_are_never_in_one_pass() -> None:
    model, optimizer, engine = attached(sampling="shuffle", batch_size=8, sample_size=24)
    x, y = torch.randn(24, 4), torch.arange(24) % 2
    engine.begin_epoch()
    loss(model).backward()
    optimizer.step()
    for a, b in engine.batches(x, y, steps=1):  # batches of the engine's own shuffle: another pass
        loss(model, a, b).backward()
        optimizer.step()
    assert engine.ledger.entries[0][1] == 2
    with pytest.raises(EpochError, match="belongs to no pass"):
        optimizer.step()
    loop = engine.batches(x, y, steps=2)
    loss(model, *next(loop)).backward()
    engine.begin_epoch()
    with pytest.raises(EpochError, match="use one loop over batches at a time"):
        optimizer.step()
    _, _, poisson = attached()
    with pytest.raises(EpochError, match="is for sampling='shuffle'"):
        poisson.begin_epoch()


# --- state -------------------------------------------------------------------------------------


def test_an_open_batch_is_not_stored() -> None:
    model, optimizer, engine = attached()
    loss(model).backward()
    optimizer.virtual_step()
    with pytest.raises(RuntimeError, match="has no noise yet"):
        engine.state_dict()
    optimizer.step()
    assert json.dumps(engine.state_dict())


def test_loading_never_unspends() -> None:
    _, optimizer, engine = attached()
    optimizer.step()
    earlier = engine.state_dict()
    optimizer.step()
    with pytest.raises(ValueError, match="loading it would erase their charges"):
        engine.load_state_dict(earlier)
    _, other_optimizer, other = attached(noise_multiplier=2.0)
    other_optimizer.step()
    with pytest.raises(ValueError, match="would erase their charges"):
        other.load_state_dict(engine.state_dict())
    assert other.steps == 1
    with pytest.raises(ValueError, match="not the state of this version's privacy engine"):
        other.load_state_dict({})


def test_a_calibrated_engine_takes_its_own_state_only() -> None:
    target: dict[str, Any] = {"noise_multiplier": None, "target_epsilon": 3.0}
    _, optimizer, engine = attached(**target, steps=10, batches="poisson")
    optimizer.step()
    _, _, other = attached(**target, steps=20)
    with pytest.raises(ValueError, match="with the same arguments"):
        other.load_state_dict(engine.state_dict())


# --- arguments ---------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, r"batch_size must be a whole number >= 1 .*got 0"),
    ({"batch_size": math.nan}, r"batch_size must be a whole number >= 1 .*got nan"),
    ({"batch_size": 2.5}, r"batch_size must be a whole number"),
    ({"batch_size": 50}, r"batch_size must be at most sample_size=40, got 50"),
    ({"sample_size": -1}, r"sample_size must be a whole number"),
    ({"noise_multiplier": -1.0}, r"noise_multiplier must be finite and >= 0, got -1"),
    ({"noise_multiplier": math.nan}, r"noise_multiplier must be finite"),
    ({"noise_multiplier": None}, r"exactly one of noise_multiplier and target_epsilon.*neither"),
    ({"target_epsilon": 1.0}, r"exactly one of noise_multiplier and target_epsilon, got both"),
    ({"noise_multiplier": None, "target_epsilon": 1.0}, r"steps and epochs, got neither"),
    ({"steps": 5}, r"steps and epochs calibrate"),
    (
        {"noise_multiplier": None, "target_epsilon": 1.0, "steps": 3, "epochs": 1},
        r"steps and epochs, got both",
    ),
    (
        {"noise_multiplier": None, "target_epsilon": 1.0, "epochs": -1},
        r"epochs must be finite and > 0, got -1",
    ),
    ({"noise_multiplier": None, "target_epsilon": -1.0, "steps": 3}, r"target_epsilon must be"),
    ({"target_delta": 0.0}, r"target_delta must lie strictly between 0 and 1, got 0"),
    ({"max_grad_norm": 0.0}, r"max_grad_norm must be > 0, got 0"),
    ({"max_grad_norm": math.nan}, r"max_grad_norm must be > 0, got nan"),
    ({"max_grad_norm": math.inf}, r"max_grad_norm must be finite where noise is added"),
    ({"max_grad_norm": [1.0, -1.0]}, r"max_grad_norm must be > 0, got -1"),
    ({"max_grad_norm": [1.0] * 3}, r"2 trainable layers \(body, head\)"),
    ({"sampling": "uniform"}, r"sampling must be 'poisson' or 'shuffle', got 'uniform'"),
    ({"loss_reduction": "none"}, r"loss_reduction must be 'mean' or 'sum', got 'none'"),
    ({"accountant": "gdp"}, r"'gdp' is a limit theorem.*accountant='pld'"),
    ({"accountant": "exact"}, r"accountant must be one of"),
    ({"adjacency": "other"}, r"adjacency must be one of"),
    ({"sampling": "shuffle", "adjacency": "add_remove"}, r"use sampling='poisson'"),
    ({"max_physical_batch": 0}, r"max_physical_batch must be a whole number"),
    ({"seed": -1}, r"seed must be a whole number >= 0"),
    ({"seed": 1, "secure_mode": True}, r"secure_mode takes no seed"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_arguments_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attached(**settings)


def test_a_delta_that_protects_nobody_is_noticed(logged: Any) -> None:
    attached(target_delta=0.1)
    assert "well below 0.025" in logged.text


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        PrivacyEngine(nn.Tanh(), batch_size=1, sample_size=2, noise_multiplier=1.0)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


def wrong_loaders() -> Iterator[tuple[Any, str]]:
    dataset = TensorDataset(X, Y)
    weighted = WeightedRandomSampler([1.0] * 8, 8)
    replacing = RandomSampler(dataset, replacement=True)
    yield DataLoader(Stream()), "IterableDataset cannot be sampled"
    yield DataLoader(dataset, batch_sampler=[[0], [1]]), "no batch_sampler"
    yield DataLoader(dataset, sampler=weighted), "WeightedRandomSampler"
    yield DataLoader(dataset, sampler=replacing), "RandomSampler, whose choice"
    yield DataLoader(TensorDataset(X[:0], Y[:0])), "empty dataset"


@pytest.mark.parametrize(("loader", "message"), list(wrong_loaders()))
def test_loaders_that_cannot_be_replaced_are_refused(loader: Any, message: str) -> None:
    model = Two()
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        PrivacyEngine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    assert "step" not in optimizer.__dict__


def test_a_loaders_length_is_private_under_add_remove() -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "adjacency": "add_remove"}
    with pytest.raises(ValueError, match=r"engine\.private_loader"):
        PrivacyEngine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0, **settings
        )
    engine = PrivacyEngine(model, batch_size=2, sample_size=10, **settings)
    assert len(engine.private_loader(loader)) == 5


def test_batches_of_unequal_tensors_are_refused() -> None:
    _, _, engine = attached()
    with pytest.raises(ValueError, match=r"share one length, got \[8, 7\]"):
        engine.batches(X, Y[:7])
