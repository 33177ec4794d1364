"""The facade: right updates, one noise draw and one charge for each batch, nothing left behind."""

import copy
import json
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.optimizers.perlayeroptimizer import DPPerLayerOptimizer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from fedsim.accountant import (
    Accountant,
    EpochShuffled,
    Gaussian,
    MomentsAccountant,
    PldAccountant,
    PoissonSampled,
    RdpAccountant,
)
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.clients import PrivacyEngine
from fedsim.clients.clipping.adaptive import AdaptiveClipping
from fedsim.clients.clipping.clipping import AutomaticClipping, LayerClipping
from fedsim.clients.gradients.per_example import ClipBounds, ClippedRows
from fedsim.clients.privacy_engine.batch_schedule import BudgetExhaustedError, EpochError
from fedsim.clients.privacy_engine.loaders import SkippedBatchError
from fedsim.clients.privacy_engine.recorded_pass import PaddedRecording

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[list[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads cost more than they give on models of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """A convolution, a normalisation and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x))).flatten(1))


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net().to(dtype)


def data(n: int = 40, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 4, 4, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (n,), generator=generator)


def dirac(size: int) -> nn.Linear:
    """A model whose per-example gradient of the sum of outputs is the example itself."""
    return nn.Linear(size, 1, bias=False)


def sgd(model: nn.Module, lr: float = 1.0) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def engine_for(model: nn.Module, **settings: Any) -> PrivacyEngine:
    """An engine that adds no noise and clips nothing, but for what `settings` say."""
    plain = {"batch_size": 8, "sample_size": 40, "noise_multiplier": 0.0, "seed": 0}
    if settings.get("noise_multiplier", 0.0) == 0.0 and "target_epsilon" not in settings:
        plain["max_grad_norm"] = math.inf
    if "target_epsilon" in settings:
        del plain["noise_multiplier"]
    return PrivacyEngine(model, **(plain | settings))


def backward(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> None:
    functional.cross_entropy(model(x), y, reduction=reduction).backward()


def checked(engine: PrivacyEngine) -> PrivacyEngine:
    """Check the loss of `backward`, without which no ε is printed."""
    engine.check_isolation(nn.CrossEntropyLoss(), *data(4, seed=9))
    return engine


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- what is computed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reduction"),
    [("sgd", "mean"), ("nesterov", "sum"), ("adam", "mean"), ("adamw", "sum")],
)
def test_without_noise_and_clipping_it_is_plain_training(kind: str, reduction: str) -> None:
    x, y = data(8)
    ours, plain = net(), net()
    optimizer = OPTIMIZERS[kind](list(ours.parameters()))
    reference = OPTIMIZERS[kind](list(plain.parameters()))
    engine = engine_for(ours, sample_size=8, loss_reduction=reduction)
    with engine.attach(optimizer):
        for _ in range(8):
            optimizer.zero_grad()
            backward(ours, x, y, reduction)
            optimizer.step()
            reference.zero_grad()
            (functional.cross_entropy(plain(x), y, reduction="sum") / 8).backward()
            reference.step()
    torch.testing.assert_close(values(ours), values(plain), rtol=1e-9, atol=1e-11)
    assert (values(ours) - values(net())).abs().max() > 0.05, "nothing was trained"


def test_poisson_batches_are_divided_by_the_declared_batch() -> None:
    x, y = data()
    ours, plain = net(), net()
    optimizer, reference = sgd(ours, 0.2), sgd(plain, 0.2)
    sizes = []
    with engine_for(ours).attach(optimizer) as engine:
        for a, b in engine.batches(x, y, steps=20):
            sizes.append(len(a))
            optimizer.zero_grad()
            backward(ours, a, b)
            optimizer.step()
            reference.zero_grad()
            (functional.cross_entropy(plain(a), b, reduction="sum") / 8).backward()
            reference.step()
    assert len(set(sizes)) > 3
    torch.testing.assert_close(values(ours), values(plain), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("per_layer", [False, True])
def test_with_clipping_it_is_opacus_update(per_layer: bool) -> None:
    x, y = data(8)
    ours, theirs = net(), GradSampleModule(net(), loss_reduction="mean")
    bounds: Any = [0.3, 0.2, 0.1, 0.4, 0.5, 0.6] if per_layer else 0.7
    kind: Any = DPPerLayerOptimizer if per_layer else DPOptimizer
    reference = kind(
        torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9),
        noise_multiplier=0.0,
        max_grad_norm=bounds,
        expected_batch_size=8,
    )
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5, momentum=0.9)
    engine = engine_for(ours, sample_size=8, max_grad_norm=bounds)
    within = []
    with engine.attach(optimizer):
        for _ in range(20):
            for model, opt in ((ours, optimizer), (theirs, reference)):
                opt.zero_grad()
                backward(model, x, y)
                opt.step()
            assert engine.private_statistics is not None
            within.append(min(engine.private_statistics.within))
    assert sum(count < 8 for count in within) > 3, "the test needs clipped examples"
    # Opacus divides by norm + 1e-6, we keep 1e-6 of room: relative, over 20 steps.
    torch.testing.assert_close(values(ours), values(theirs), rtol=3e-4, atol=3e-5)


@pytest.mark.parametrize("cuts", [[1, 2, 1, 4], [4, 0, 4]])
def test_how_a_batch_is_split_changes_nothing(cuts: list[int]) -> None:
    x, y = data(8)
    results = []
    for sizes in ([8], cuts):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        engine = engine_for(model, noise_multiplier=0.8, max_grad_norm=0.4, batches="poisson")
        with engine.attach(optimizer):
            for _ in range(3):
                parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
                for a, b in parts[:-1]:
                    backward(model, a, b)
                    optimizer.virtual_step()  # type: ignore[attr-defined]
                    optimizer.zero_grad()  # never touches what virtual_step added up
                backward(model, *parts[-1])
                optimizer.step()
        results.append(values(model))
        assert engine.ledger.to_list() == engine_ledger(engine, 3, 0.2, 0.8)
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


def charged_noise(engine: PrivacyEngine, nominal: float) -> float:
    """The noise multiplier that the grid leaves, hardly less than the nominal one."""
    found = engine._steps.mechanism.effective_noise_multiplier
    assert nominal * (1 - 1e-3) < found < nominal == engine.noise_multiplier
    return found


def engine_ledger(
    engine: PrivacyEngine, steps: int, rate: float, noise: float
) -> list[dict[str, Any]]:
    event = {"type": "Gaussian", "noise_multiplier": charged_noise(engine, noise)}
    sampled = {"type": "PoissonSampled", "sampling_rate": rate, "event": event}
    return [{"event": sampled, "count": steps}]


def test_max_physical_batch_changes_nothing_but_speed() -> None:
    x, y = data()
    results, longest = [], 0
    for most in (None, 3):
        model = net()
        optimizer = sgd(model, 0.3)
        engine = engine_for(model, noise_multiplier=0.8, max_grad_norm=0.4, max_physical_batch=most)
        with engine.attach(optimizer):
            for a, b in engine.batches(x, y, steps=3):
                longest = max(longest, len(a)) if most else longest
                optimizer.zero_grad()
                backward(model, a, b)
                optimizer.step()
        assert engine.steps == 3
        results.append(values(model))
    assert longest == 3
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


def test_an_example_that_is_not_finite_adds_nothing_and_is_counted() -> None:
    model = dirac(2)
    optimizer = sgd(model)
    before = values(model)
    engine = engine_for(model, batch_size=2, max_grad_norm=1.0)
    with engine.attach(optimizer):
        model(torch.tensor([[math.nan, 1.0], [0.0, 0.5]])).mean().backward()
        optimizer.step()
    torch.testing.assert_close(before - values(model), torch.tensor([0.0, 0.25]))
    assert engine.private_statistics is not None
    assert engine.private_statistics.not_finite == 1


def test_tied_frozen_and_unused_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.first.bias.requires_grad_(False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    model = Tied().double()
    frozen = model.first.bias.clone()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 3, (5,))
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for i in range(5):
        found = torch.autograd.grad(
            functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]),
            parameters,
            materialize_grads=True,
        )
        gradient = torch.cat([g.flatten() for g in found])
        expected += gradient * min(1.0, 0.3 / gradient.norm().item())
    optimizer = sgd(model)
    with engine_for(model, max_grad_norm=0.3).attach(optimizer):
        backward(model, x, y)
        optimizer.step()
        gradients = [p.grad for p in parameters if p.grad is not None]
        released = torch.cat([g.flatten() for g in gradients])
        torch.testing.assert_close(released, expected / 8, rtol=0, atol=1e-6)
        assert len(gradients) == len(parameters), "unused parameters get noise too"
    assert torch.equal(model.first.bias, frozen)
    assert model.first.bias.grad is None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_layers_without_a_rule_run_as_units(reduction: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 3), nn.PReLU()).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    expected = torch.zeros(values(model).numel(), dtype=torch.float64)
    for i in range(6):
        one = functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(one, list(model.parameters()))]
        )
        expected += gradient * min(1.0, 0.3 / gradient.norm().item())
    optimizer = sgd(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    with engine_for(model, max_grad_norm=0.3, loss_reduction=reduction).attach(optimizer):
        backward(model, x, y, reduction)
        optimizer.zero_grad()
        for part in (slice(0, 2), slice(2, 6)):
            backward(model, x[part], y[part], reduction)
            optimizer.virtual_step()  # type: ignore[attr-defined]
        optimizer.step()
    released = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(released, expected / 8, rtol=0, atol=1e-6)
    assert pointers == [p.data_ptr() for p in model.parameters()], "values moved in memory"


def test_layers_get_bounds_of_their_own() -> None:
    model = net()
    by_layer = engine_for(model, max_grad_norm=[1.0, 2.0, 3.0])
    by_tensor = engine_for(net(), max_grad_norm=[1.0] * 6)
    assert by_layer.event == PoissonSampled(0.2, by_layer.event.event)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"3 trainable layers .*6 trainable tensors, got 2"):
        engine_for(net(), max_grad_norm=[1.0, 2.0])
    for engine in (by_layer, by_tensor):
        assert engine.get_epsilon(1e-5) == 0.0


def test_groups_and_automatic_clipping_spend_what_flat_spends() -> None:
    spent = []
    for clipping in (
        1.0,
        LayerClipping(1.0),
        AutomaticClipping(1.0),
        AdaptiveClipping.flat(1.0, count_noise=2.0),
    ):
        model = net()
        optimizer = sgd(model)
        engine = engine_for(model, noise_multiplier=1.0, max_grad_norm=clipping, accountant="rdp")
        with engine.attach(optimizer):
            for _ in range(5):
                optimizer.step()  # an empty batch
        spent.append(engine.get_epsilon(1e-5))
    assert spent == pytest.approx([spent[0]] * 4, rel=1e-6)


def test_evaluation_mode_and_dropout() -> None:
    layer = nn.Linear(4, 8)
    model = nn.Sequential(layer, nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = sgd(model)
    with engine_for(model).attach(optimizer):
        model.eval()
        model(torch.ones(3, 4)).mean().backward()
        optimizer.step()
        first = layer.weight.grad
        assert first is not None
        assert (first.abs().sum(1) > 0).all(), "no unit was dropped"
        assert not model.training


# --- noise -------------------------------------------------------------------------------------

SIZE = 50_000


def noise_of_a_batch(parts: int, multiplier: float = 1.3, **settings: Any) -> Tensor:
    model = dirac(SIZE)
    optimizer = sgd(model)
    engine = engine_for(
        model, batch_size=10, noise_multiplier=multiplier, max_grad_norm=0.5, **settings
    )
    with engine.attach(optimizer):
        for _ in range(parts):
            model(torch.zeros(2, SIZE)).mean().backward()
            optimizer.virtual_step()  # type: ignore[attr-defined]
        optimizer.step()
    gradient = model.weight.grad
    assert gradient is not None
    return gradient.flatten() * 10 / 0.5


def has_deviation_of(expected: float, noise: Tensor) -> bool:
    # Four standard errors of a standard deviation: 6e-5 of false alarms, and a fixed seed.
    return abs(noise.std().item() / expected - 1) < 4 / math.sqrt(2 * SIZE)


@pytest.mark.parametrize(("parts", "secure"), [(0, True), (1, False), (4, True)])
def test_noise_is_added_once_a_batch(parts: int, secure: bool) -> None:
    settings: dict[str, Any] = {"secure_mode": True, "seed": None} if secure else {}
    assert has_deviation_of(1.3, noise_of_a_batch(parts, **settings))


@pytest.mark.parametrize("factor", [1.03, 0.97])
def test_noise_that_is_three_percent_off_is_seen(factor: float) -> None:
    assert not has_deviation_of(1.3, noise_of_a_batch(0, 1.3 * factor))


def test_noise_is_independent_of_other_steps_seeds_and_torchs_own() -> None:
    torch.manual_seed(5)
    one = noise_of_a_batch(1)
    state = torch.get_rng_state()
    torch.manual_seed(6)
    assert torch.equal(one, noise_of_a_batch(1)), "torch's seed has an effect"
    torch.manual_seed(5)
    dirac(SIZE)  # which draws its weights
    assert torch.equal(state, torch.get_rng_state()), "the engine drew from torch's own generator"
    others = [
        noise_of_a_batch(0, seed=1),
        noise_of_a_batch(0, seed=None),
        noise_of_a_batch(0, seed=None),
    ]
    sequence = np.random.SeedSequence(0, spawn_key=(1, 2))
    others.append(noise_of_a_batch(0, seed=sequence))
    for a, b in zip([one, *others], [*others, one], strict=True):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / math.sqrt(SIZE)
    model = dirac(SIZE)
    optimizer = sgd(model)
    steps = []
    with engine_for(model, noise_multiplier=1.0, max_grad_norm=1.0).attach(optimizer):
        for _ in range(2):
            optimizer.step()
            assert model.weight.grad is not None
            steps.append(model.weight.grad.flatten())
    assert abs(torch.corrcoef(torch.stack(steps))[0, 1]) < 5 / math.sqrt(SIZE)


def test_neighbours_share_noise_divisor_and_charge() -> None:
    """N and N + 1 examples with the same public settings differ by one clipped gradient."""
    released = []
    for rows in (torch.eye(3), torch.cat([torch.eye(3), torch.tensor([[0.0, 0.0, 9.0]])])):
        model = dirac(3)
        optimizer = sgd(model)
        engine = engine_for(model, batch_size=40, noise_multiplier=2.0, max_grad_norm=1.0)
        with engine.attach(optimizer):
            model(rows).mean().backward()
            optimizer.step()
        assert model.weight.grad is not None
        released.append(model.weight.grad.flatten())
        assert engine.ledger.entries == ((Gaussian(charged_noise(engine, 2.0)), 1),)
    difference = (released[1] - released[0]) * 40
    torch.testing.assert_close(difference, torch.tensor([0.0, 0.0, 1.0]), rtol=1e-5, atol=1e-5)


def test_reusing_a_seed_is_noticed(logged: Any) -> None:
    noise_of_a_batch(0, seed=987)
    assert "can subtract the noise" not in logged.text
    noise_of_a_batch(0, seed=987)
    assert "can subtract the noise" in logged.text


# --- what is charged ---------------------------------------------------------------------------


def test_each_batch_is_charged_once_also_an_empty_one() -> None:
    model = net()
    optimizer = sgd(model)
    x, y = data()
    engine = engine_for(model, noise_multiplier=1.1, max_grad_norm=1.0, batches="poisson")
    assert engine.get_privacy_spent(1e-5) == (0.0, None)
    with engine.attach(optimizer):
        backward(model, x[:8], y[:8])
        optimizer.step()
        before = values(model)
        optimizer.step()  # again, without gradients: pure noise
        assert (values(model) != before).all()
        backward(model, x[:0], y[:0])
        optimizer.step()
    checked(engine)
    assert engine.steps == 3
    charged = Gaussian(charged_noise(engine, 1.1))
    assert engine.ledger.entries == ((PoissonSampled(0.2, charged), 3),)
    pld = PldAccountant().compose(engine.event, 3)
    epsilon, alpha = engine.get_privacy_spent(delta=1e-5)
    assert epsilon == engine.get_epsilon() == epsilon_with_slack(pld.get_epsilon, 1e-5)
    assert alpha is None


@pytest.mark.parametrize(
    ("settings", "accountant"),
    [
        ({"accountant": "rdp"}, RdpAccountant()),
        ({"accountant": "moments"}, MomentsAccountant()),
        ({"alphas": range(2, 8)}, RdpAccountant(range(2, 8))),
    ],
)
def test_the_order_is_that_of_the_accountant(
    settings: dict[str, Any], accountant: Accountant
) -> None:
    model = net()
    settings |= {"noise_multiplier": 1.1, "max_grad_norm": 1.0, "batches": "poisson"}
    engine = engine_for(model, **settings)
    optimizer = sgd(model)
    with engine.attach(optimizer):
        for _ in range(4):
            optimizer.step()  # an empty batch
    accountant.compose(engine.event, 4)
    epsilon, alpha = engine.get_privacy_spent(delta=1e-5)
    assert epsilon == engine.get_epsilon() == epsilon_with_slack(accountant.get_epsilon, 1e-5)
    assert alpha == accountant.get_privacy_spent(1e-5).best_order
    left = engine.remaining(2 * epsilon, 1e-5)
    assert accountant.compose(engine.event, left).get_epsilon(1e-5) <= 2 * epsilon
    assert accountant.compose(engine.event).get_epsilon(1e-5) > 2 * epsilon


def test_the_charge_comes_before_the_update() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("the power went out")

    model = dirac(3)
    optimizer = Broken(model.parameters(), lr=1.0)
    with engine_for(model, noise_multiplier=1.0, max_grad_norm=1.0).attach(optimizer) as engine:
        model(torch.ones(2, 3)).mean().backward()
        with pytest.raises(RuntimeError, match="power"):
            optimizer.step()
        assert engine.ledger.entries[0][1] == 1
        with pytest.raises(RuntimeError, match="power"):
            optimizer.step()
        assert engine.private_statistics is not None
        assert engine.private_statistics.examples == 0, "a batch is released at most once"


def test_an_interrupted_virtual_step_counts_no_example_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory may end between two padded batches, and a loop may then try again."""
    model = dirac(3)
    optimizer, x = sgd(model), torch.ones(20, 3)  # of which 16 are in the first padded batch
    clipped, calls = PaddedRecording.clipped, list[int]()

    def failing(self: PaddedRecording, clip: ClipBounds) -> ClippedRows:
        calls.append(self.examples)
        if len(calls) == 3:
            raise MemoryError
        return clipped(self, clip)

    monkeypatch.setattr(PaddedRecording, "clipped", failing)
    with engine_for(model, batches="poisson").attach(optimizer) as engine:
        engine.backward(model(x[:2]).sum(1))
        optimizer.virtual_step()  # type: ignore[attr-defined]
        engine.backward(model(x).sum(1))
        with pytest.raises(MemoryError):
            optimizer.virtual_step()  # type: ignore[attr-defined]
        engine.backward(model(x).sum(1))
        optimizer.virtual_step()  # type: ignore[attr-defined]
        optimizer.step()
    assert calls == [2, 16, 4, 16, 4]
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((1, 3), 20 / 8))  # the sum before is dropped


def test_calibrated_noise_meets_the_target_and_stops_there() -> None:
    model = net()
    optimizer = sgd(model)
    x, y = data()
    engine = engine_for(model, target_epsilon=4.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0)
    checked(engine)
    assert engine.terms.planned_steps == 10
    assert engine.remaining(100.0) == 10
    with engine.attach(optimizer):
        for a, b in engine.batches(x, y):
            backward(model, a, b)
            optimizer.step()
        assert 3.99 < engine.get_epsilon() <= 4.0
        assert engine.remaining(4.0) == 0
        before = values(model)
        with pytest.raises(BudgetExhaustedError, match=r"10 steps, and they are taken"):
            optimizer.step()
        assert torch.equal(values(model), before)
        assert engine.steps == 10


def test_shuffled_passes_are_charged_when_they_start() -> None:
    x, y = data(20)
    model = net()
    optimizer = sgd(model)
    engine = engine_for(
        model, sample_size=20, sampling="shuffle", noise_multiplier=2.0, max_grad_norm=1.0
    )
    charged, seen = [], []
    with checked(engine).attach(optimizer):
        for a, b in engine.batches(x, y, steps=7):
            backward(model, a, b)
            optimizer.step()
            charged.append(engine.ledger.entries[0][1])
            seen.append(a[:, 0, 0, 0])
    assert charged == [1, 1, 1, 2, 2, 2, 3]
    charged = Gaussian(charged_noise(engine, 2.0))
    assert engine.ledger.entries[0][0] == EpochShuffled(3, charged)
    exact = PldAccountant().compose(charged, 3).get_epsilon
    assert engine.get_epsilon() == epsilon_with_slack(exact, 1e-5)
    for start in (0, 3):
        whole = torch.cat(seen[start : start + 3]).sort().values
        assert torch.equal(whole, x[:, 0, 0, 0].sort().values)
    assert engine.remaining(engine.get_epsilon() * (1 + 1e-9)) == 2, (
        "the rest of the third pass is paid for"
    )


def test_calibrating_shuffled_passes() -> None:
    engine = engine_for(net(), sampling="shuffle", target_epsilon=4.0, epochs=3, max_grad_norm=1.0)
    passes = PldAccountant().compose(Gaussian(engine.noise_multiplier), 3)
    assert 3.99 < passes.get_epsilon(1e-5) <= 4.0


# --- resuming ----------------------------------------------------------------------------------


def train(
    engine: PrivacyEngine, model: nn.Module, optimizer: Optimizer, steps: int, seed: int = 1
) -> None:
    x, y = data(seed=seed)
    for a, b in engine.batches(x, y, steps=steps):
        optimizer.zero_grad()
        backward(model, a, b)
        optimizer.step()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sampling": "shuffle", "max_grad_norm": AdaptiveClipping.flat(0.5, count_noise=2.0)},
        {
            "max_grad_norm": AdaptiveClipping(("head.*", "*"), (0.5, 0.2), count_noise=2.0),
            "max_physical_batch": 3,
        },
    ],
)
def test_resuming_is_as_if_nothing_had_happened(settings: dict[str, Any]) -> None:
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.5} | settings

    def start() -> tuple[Net, Optimizer, PrivacyEngine]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        return model, optimizer, engine_for(model, **settings).attach(optimizer)

    model, optimizer, engine = start()
    train(engine, model, optimizer, 5)
    through = values(model), engine.ledger

    model, optimizer, engine = start()
    for steps in (2, 3):  # rounds, with a new process in between
        saved = json.loads(json.dumps(engine.state_dict()))
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model, optimizer, engine = start()
        engine.load_state_dict(saved)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        train(engine, model, optimizer, steps)
    assert torch.equal(values(model), through[0])
    assert engine.ledger == through[1]


def test_state_is_plain_and_keeps_no_seed_that_nobody_gave() -> None:
    engine = engine_for(net(), seed=None, noise_multiplier=1.0, max_grad_norm=1.0)
    assert engine.state_dict()["streams"] is None
    engine.load_state_dict(engine.state_dict())


def test_a_pass_has_one_data_set() -> None:
    x, y = data(40)
    model = net()
    optimizer = sgd(model)
    engine = engine_for(model, sampling="shuffle", noise_multiplier=1.0, max_grad_norm=0.5)
    with engine.attach(optimizer):
        train(engine, model, optimizer, 3)
        with pytest.raises(EpochError, match=r"20 rows.* 40 rows.* other 2 batches"):
            next(iter(engine.batches(x[:20], y[:20])))
        train(engine, model, optimizer, 2)
        for a, b in engine.batches(x[:20], y[:20], steps=1):
            backward(model, a, b)
            optimizer.step()
    assert [count for _, count in engine.ledger.entries] == [2]


@pytest.mark.parametrize("secure_mode", [False, True])
def test_without_a_seed_a_resumed_pass_is_a_new_pass(secure_mode: bool) -> None:
    """The rest of the old shuffle is unknown; an example of both would be charged once."""
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "sampling": "shuffle"}
    settings |= {"seed": None, "accountant": "rdp"}
    state, entries = None, ()
    for _ in range(2):
        model = net()
        optimizer = sgd(model)
        engine = checked(engine_for(model, secure_mode=secure_mode, **settings))
        if state is not None:
            engine.load_state_dict(state)
            assert engine.remaining(engine.get_epsilon() * (1 + 1e-9)) == 0
        with engine.attach(optimizer):
            train(engine, model, optimizer, 3)
        state, entries = json.loads(json.dumps(engine.state_dict())), engine.ledger.entries
        assert engine.remaining(engine.get_epsilon() * (1 + 1e-9)) == 2
    assert [count for _, count in entries] == [2]


def test_a_refused_state_changes_nothing() -> None:
    model = net()
    adaptive = AdaptiveClipping.flat(0.5, count_noise=2.0)
    optimizer = sgd(model)
    with engine_for(model, noise_multiplier=1.0, max_grad_norm=adaptive).attach(
        optimizer
    ) as engine:
        train(engine, model, optimizer, 2)
    fixed = engine_for(net(), noise_multiplier=1.0, max_grad_norm=0.5)
    with pytest.raises(ValueError, match="fixed clip norm"):
        fixed.load_state_dict(engine.state_dict())
    with pytest.raises(ValueError, match="clip norm is fixed, and this engine adapts it"):
        engine_for(net(), noise_multiplier=1.0, max_grad_norm=adaptive).load_state_dict(
            fixed.state_dict()
        )
    assert (fixed.steps, len(fixed.ledger)) == (0, 0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_has_no_copy_with_the_same_noise(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"same noise.*load_state_dict"):
        copied(engine_for(net(), seed=None))


def test_leaving_a_loop_within_a_batch_drops_it() -> None:
    x, y = data()
    model = net()
    optimizer = sgd(model)
    engine = engine_for(model, batch_size=20, max_physical_batch=4)
    with engine.attach(optimizer):
        for a, b in engine.batches(x, y):
            backward(model, a, b)
            optimizer.step()
            break
        assert engine.steps == 0
        optimizer.step()
        assert engine.private_statistics is not None
        assert engine.private_statistics.examples == 0


def test_a_skipped_batch_is_noticed() -> None:
    x, y = data()
    model = net()
    with (
        engine_for(model).attach(sgd(model)) as engine,
        pytest.raises(SkippedBatchError, match=r"the batch of step 0 was followed by 0 calls"),
    ):
        for _ in engine.batches(x, y, steps=3):
            pass


# --- nothing left behind -----------------------------------------------------------------------


def test_detaching_restores_everything() -> None:
    model = net()
    optimizer = sgd(model)
    before = set(model.__dict__), set(optimizer.__dict__)
    engine = engine_for(model)
    engine.attach(optimizer)
    assert optimizer.privacy_engine is engine  # type: ignore[attr-defined]
    copied = pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.deepcopy(optimizer)
    engine.detach()
    engine.detach()
    assert (set(model.__dict__), set(optimizer.__dict__)) == before
    assert optimizer.step.__func__ is type(optimizer).step
    assert optimizer.zero_grad.__func__ is type(optimizer).zero_grad
    assert model.forward.__func__ is Net.forward
    plain = pickle.loads(pickle.dumps(model))
    x, y = data(5)
    for trained in (model, plain, *copied[:2]):
        trained.zero_grad()
        backward(trained, x, y)
        gradients = [p.grad for p in trained.parameters()]
        assert all(g is not None and g.abs().sum() > 0 for g in gradients)
    assert not hasattr(copied[2], "virtual_step")
    engine.attach(optimizer).detach()


def test_own_patches_of_others_come_back() -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    theirs = optimizer.__dict__["step"]
    engine = engine_for(model)
    engine.attach(optimizer).detach()
    assert optimizer.__dict__["step"] is theirs
    with engine.attach(optimizer):
        later = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.step()
        scheduler.step()
        later.step()
        assert optimizer.param_groups[0]["lr"] == 0.25
    before = values(model)
    x, y = data(5)
    backward(model, x, y)
    optimizer.step()
    assert not torch.equal(values(model), before), "a scheduler's wrapper still reaches the step"


# --- for those who know Opacus -----------------------------------------------------------------


class Pairs(Dataset[Any]):
    """A data set that is no TensorDataset."""

    def __init__(self, n: int) -> None:
        self.x, self.y = data(n)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def with_their_number(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return default_collate(rows) | {"rows": torch.tensor(len(rows))}


def test_make_private_end_to_end() -> None:
    x, y = data(60)
    y = (x[:, 0, 0, 0] > 0).long()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with torch.no_grad():
        start = functional.cross_entropy(model(x), y).item()
    private, same, loader = PrivacyEngine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True),
        noise_multiplier=0.6,
        max_grad_norm=1.0,
        seed=0,
    )
    assert private is model
    assert same is optimizer
    assert len(loader) == 4
    sizes = []
    for _ in range(8):
        for a, b in loader:
            sizes.append(len(a))
            optimizer.zero_grad()
            backward(model, a, b)
            optimizer.step()
    with torch.no_grad():
        assert functional.cross_entropy(model(x), y).item() < 0.8 * start
    engine = loader.privacy_engine
    assert isinstance(engine, PrivacyEngine)
    assert checked(engine) is optimizer.privacy_engine  # type: ignore[attr-defined]
    charged = Gaussian(charged_noise(engine, 0.6))
    expected = PldAccountant().compose(PoissonSampled(16 / 60, charged), 32)
    assert engine.get_epsilon(1e-5) == epsilon_with_slack(expected.get_epsilon, 1e-5)
    assert len(set(sizes)) > 3
    assert abs(np.mean(sizes) - 16) < 5 * math.sqrt(16 / 32)


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_of_other_data_sets_give_empty_batches_too(workers: int) -> None:
    model = net()
    optimizer = sgd(model, 0.1)
    _, _, loader = PrivacyEngine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(
            Pairs(12), batch_size=1, num_workers=workers, collate_fn=with_their_number
        ),
        target_epsilon=5.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
        max_physical_batch=1,
        seed=0,
    )
    sizes = []
    for batch in loader:
        sizes.append(len(batch["x"]))
        assert batch["x"].shape[1:] == (1, 4, 4)
        backward(model, batch["x"], batch["y"])
        optimizer.step()
    assert set(sizes) == {0, 1}
    engine = loader.privacy_engine
    assert isinstance(engine, PrivacyEngine)
    assert engine.steps == 12
    assert checked(engine).get_epsilon() <= 5.0


class Doubled(TensorDataset):
    """Tensors whose examples are changed on the way out, as by augmentation."""

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return 2 * x, y


def test_a_data_set_over_tensors_keeps_its_own_way_to_read_examples() -> None:
    x, y = torch.ones(12, 1, 4, 4, dtype=torch.float64), torch.zeros(12, dtype=torch.long)
    loader = engine_for(net()).private_loader(DataLoader(Doubled(x, y), batch_size=8))
    batch, _ = next(iter(loader))
    assert len(batch)
    assert (batch == 2).all()


def test_make_private_with_shuffled_passes() -> None:
    x, y = data(20)
    model = net()
    optimizer = sgd(model, 0.1)
    _, _, loader = PrivacyEngine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        noise_multiplier=3.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for _ in range(2):
        rows = []
        for a, b in loader:
            rows.append(a[:, 0, 0, 0])
            backward(model, a, b)
            optimizer.step()
        assert torch.equal(torch.cat(rows).sort().values, x[:, 0, 0, 0].sort().values)
    engine = loader.privacy_engine
    assert isinstance(engine, PrivacyEngine)
    charged = Gaussian(charged_noise(engine, 3.0))
    assert engine.ledger.entries == ((EpochShuffled(3, charged), 2),)
