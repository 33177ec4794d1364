"""Scripts written for Opacus, old and new: they run here, private as charged, or say why not."""

import copy
import inspect
import math
import pickle
from typing import Any

import numpy as np
import opacus
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled, RdpAccountant
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.clients import BatchMemoryManager, ModuleValidator, PrivacyEngine
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.privacy_engine.opacus_names import ARGUMENTS, ATTRIBUTES

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
ALPHAS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))


def parts(lr: float = 0.5, **loader: Any) -> tuple[nn.Module, Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"batch_size": 10, "shuffle": True} | loader
    return model, optimizer, DataLoader(TensorDataset(X, Y), **settings)


def train(model: nn.Module, optimizer: Optimizer, loader: Any, criterion: Any) -> list[float]:
    """One epoch as tutorials write it."""
    losses = []
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        np.argmax(output.detach().cpu().numpy(), axis=1)
    return losses


def test_the_snippet_of_the_first_opacus_runs_as_printed() -> None:
    model, optimizer, train_loader = parts()
    privacy_engine = PrivacyEngine(
        model,
        batch_size=10,
        sample_size=60,
        alphas=range(2, 32),
        noise_multiplier=1.3,
        max_grad_norm=1.0,
    )
    privacy_engine.attach(optimizer)
    train(model, optimizer, train_loader, nn.CrossEntropyLoss())
    any_optimizer: Any = optimizer
    epsilon, best_alpha = any_optimizer.privacy_engine.get_privacy_spent(1e-5)
    # The loader shuffles, so nothing is amplified: each batch is a release on known examples.
    assert len(train_loader) == 6
    ((event, count),) = privacy_engine.ledger.entries
    assert isinstance(event, Gaussian)
    assert count == 6
    expected = RdpAccountant(range(2, 32)).compose(event, 6)
    assert epsilon == epsilon_with_slack(expected.get_epsilon, 1e-5)
    assert best_alpha == expected.get_privacy_spent(1e-5).best_order
    assert best_alpha in range(2, 32)


def test_positional_arguments_are_those_of_the_first_opacus() -> None:
    model, optimizer, _ = parts()
    engine = PrivacyEngine(model, 10, 60, ALPHAS, 1.3, 0.7, secure_rng=True).attach(optimizer)
    assert (engine.terms.batch_size, engine.terms.sample_size) == (10, 60)
    assert engine.terms.alphas == tuple(ALPHAS)
    assert engine.noise_multiplier == 1.3
    assert engine.state_dict()["streams"] is None, "secure noise has no seed"


@pytest.mark.parametrize(
    ("given", "batch", "population"),
    [
        ({"sample_rate": 10 / 60, "sample_size": 60}, 10, 60),
        ({"sample_rate": 10 / 60, "batch_size": 10}, 10, 60),
        ({"sample_rate": 0.11, "sample_size": 60}, 7, 60),
        ({"sample_rate": 0.11, "batch_size": 7}, 7, 63),
        ({"sample_rate": 10 / 60, "batch_size": 10, "sample_size": 60}, 10, 60),
    ],
)
def test_two_of_the_three_sizes_are_enough(
    given: dict[str, Any], batch: int, population: int
) -> None:
    terms = PrivacyEngine(parts()[0], noise_multiplier=1.0, **given).terms
    assert (terms.batch_size, terms.sample_size) == (batch, population)
    assert batch / population >= given["sample_rate"] * (1 - 1e-9), "never charged for less"


def test_a_script_of_opacus_1_runs_by_its_import_line() -> None:
    """The same text runs with both libraries; ε differs by the accountants alone."""
    found = {}
    for library in (opacus.PrivacyEngine, PrivacyEngine):
        model, optimizer, train_loader = parts()
        privacy_engine: Any = library()
        model, optimizer, train_loader = privacy_engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=train_loader,
            noise_multiplier=1.1,
            max_grad_norm=1.0,
        )
        for _ in range(3):
            train(model, optimizer, train_loader, nn.CrossEntropyLoss())
        found[library.__module__] = privacy_engine.get_epsilon(delta=1e-3)
        assert privacy_engine.accountant.get_epsilon(delta=1e-3) == found[library.__module__]
        assert len(train_loader) == 6
    theirs, ours = found.values()
    expected = PldAccountant().compose(PoissonSampled(10 / 60, Gaussian(1.1)), 18)
    assert ours == pytest.approx(expected.get_epsilon(1e-3), rel=1e-3)
    assert ours == pytest.approx(theirs, rel=0.02)


def test_a_target_holds_and_its_loader_draws_poisson_batches() -> None:
    model, optimizer, loader = parts()
    engine = PrivacyEngine(secure_mode=False)
    model, optimizer, loader = engine.make_private_with_epsilon(
        accountant="prv",
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=4.0,
        target_delta=1e-3,
        epochs=4,
        max_grad_norm=1.0,
        poisson_sampling=True,
        batch_first=True,
        grad_sample_mode="functorch",
    )
    sizes = [len(y) for _ in range(4) for _, y in counted(model, optimizer, loader)]
    assert len(set(sizes)) > 3, "batches of a Poisson sampler differ in size"
    assert 3.9 < engine.get_epsilon(1e-3) <= 4.0
    assert engine.steps == 24
    event, _ = engine.ledger.entries[0]
    assert isinstance(event, PoissonSampled)


def counted(model: nn.Module, optimizer: Optimizer, loader: Any) -> list[tuple[Tensor, Tensor]]:
    found = []
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append((x, y))
    return found


def test_ghost_clipping_returns_the_criterion() -> None:
    model, optimizer, loader = parts()
    engine = PrivacyEngine()
    criterion = nn.CrossEntropyLoss()
    model, optimizer, same, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=criterion,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    assert same is criterion
    train(model, optimizer, loader, same)
    assert engine.get_epsilon(1e-3) > 0


def test_batches_in_parts_are_the_same_training() -> None:
    trained = []
    for most in (None, 3):
        model, optimizer, loader = parts()
        engine = PrivacyEngine(seed=5)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        if most is None:
            train(model, optimizer, loader, nn.CrossEntropyLoss())
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=most, optimizer=optimizer
            ) as memory_safe_loader:
                sizes = [len(y) for _, y in counted(model, optimizer, memory_safe_loader)]
            assert max(sizes) == most
            assert engine.max_physical_batch is None
        assert engine.steps == 6
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=1e-5)


def test_memory_manager_needs_a_private_loader() -> None:
    _, optimizer, loader = parts()
    wrong: Any = loader
    with pytest.raises(ValueError, match=r"loader and the optimizer that one call"):
        BatchMemoryManager(data_loader=wrong, max_physical_batch_size=2, optimizer=optimizer)


# --- what has another place -----------------------------------------------------------------------


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"batch_first": False}, r"batch_first=False .*first dimension"),
    ({"clipping": "per_layer"}, r"clipping='per_layer' .*max_grad_norm a list"),
    ({"clipping": "adaptive"}, r"AdaptiveClipping"),
    ({"noise_generator": torch.Generator()}, r"noise_generator=.*pass seed="),
    ({"grad_sample_mode": "no_op"}, r"grad_sample_mode='no_op' .*leave it out"),
    ({"rand_on_empty": True}, r"rand_on_empty=True .*pure noise"),
    ({"target_unclipped_quantile": 0.5}, r"AdaptiveClipping\.for_batch"),
    ({"grad_sample_mode": "ghost"}, r"pass criterion="),
    ({"accountant": "gdp"}, r"accountant must be one of|limit theorem"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_arguments_without_a_meaning_here_are_named(settings: Any, message: str) -> None:
    model, optimizer, loader = parts()
    with pytest.raises(ValueError, match=message):
        PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **settings,
        )


def test_every_argument_of_opacus_has_a_place() -> None:
    ours = {
        *inspect.signature(PrivacyEngine.__init__).parameters,
        *inspect.signature(PrivacyEngine.make_private).parameters,
        *inspect.signature(PrivacyEngine.make_private_with_epsilon).parameters,
    }
    theirs = {
        *inspect.signature(opacus.PrivacyEngine.__init__).parameters,
        *inspect.signature(opacus.PrivacyEngine.make_private).parameters,
        *inspect.signature(opacus.PrivacyEngine.make_private_with_epsilon).parameters,
    }
    assert theirs - {"self", "kwargs"} <= ours | set(ARGUMENTS)


def test_every_public_name_of_opacus_engine_works_or_has_a_hint() -> None:
    engine = PrivacyEngine()
    for name in dir(opacus.PrivacyEngine()):
        if name.startswith("_") or name in ("secure_mode", "secure_rng"):
            continue
        if name in ATTRIBUTES:
            with pytest.raises(AttributeError, match=r"is not supported; use instead"):
                getattr(engine, name)
        else:
            assert hasattr(type(engine), name), name


def test_an_engine_without_a_model_says_what_to_do() -> None:
    for ask in (
        lambda: PrivacyEngine().get_epsilon(1e-5),
        lambda: PrivacyEngine().steps,
        lambda: PrivacyEngine().attach(parts()[1]),
    ):
        with pytest.raises(AttributeError, match=r"no model yet: call engine\.make_private"):
            ask()
    with pytest.raises(ValueError, match=r"need the model"):
        PrivacyEngine(batch_size=3)
    with pytest.raises(ValueError, match=r"the model alone does not say.*sample_size=len"):
        PrivacyEngine(parts()[0], noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"sample_rate=0\.1 alone does not say"):
        PrivacyEngine(parts()[0], sample_rate=0.1, noise_multiplier=1.0)
    with pytest.raises(TypeError, match=r"no argument 'noise'"):
        PrivacyEngine(parts()[0], noise=1.0)
    with pytest.raises(AttributeError, match=r"PrivacyEngine has no attribute 'spam'"):
        _ = PrivacyEngine().spam


def test_an_engine_is_one_models() -> None:
    model, optimizer, loader = parts()
    engine = PrivacyEngine()
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)
    model, optimizer, loader = parts()
    with pytest.raises(ValueError, match=r"has a model already"):
        engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)


def test_orders_belong_to_renyi() -> None:
    for settings, message in (
        ({"accountant": "pld", "noise_multiplier": 1.0}, r"takes none"),
        ({"target_epsilon": 1.0, "steps": 3}, r"exclude each other"),
    ):
        with pytest.raises(ValueError, match=message):
            PrivacyEngine(parts()[0], 10, 60, ALPHAS, **settings)


def test_grad_sample_is_a_hint_while_attached() -> None:
    model, optimizer, _ = parts()
    parameter: Any = next(model.parameters())
    with PrivacyEngine(model, 10, 60, noise_multiplier=1.0).attach(optimizer):
        for use in (lambda p: p.norm(), len, lambda p: p[0]):
            with pytest.raises((AttributeError, TypeError), match=r"clipped and summed inside"):
                use(parameter.grad_sample)
        assert next(copy.deepcopy(model).parameters()).requires_grad
        assert getattr(next(pickle.loads(pickle.dumps(model)).parameters()), "x", None) is None
    assert not hasattr(parameter, "grad_sample")


# --- models -----------------------------------------------------------------------------------


def test_the_validator_finds_and_replaces_layers_that_mix_examples() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.InstanceNorm2d(12, track_running_stats=True)
    )
    errors = ModuleValidator.validate(model)
    assert [str(error).split()[1] for error in errors] == ["'1'", "'2'"]
    assert not ModuleValidator.is_valid(model)
    with pytest.raises(UnsafeModelError, match=r"nn\.GroupNorm\(4, 12\)"):
        ModuleValidator.validate(model, strict=True)
    fixed = ModuleValidator.fix_and_validate(model)
    assert isinstance(fixed.get_submodule("1"), nn.GroupNorm)
    assert isinstance(model[1], nn.BatchNorm2d), "the model itself is not changed"
    engine = PrivacyEngine(fixed, 4, 8, noise_multiplier=1.0)
    with engine.attach(torch.optim.SGD(fixed.parameters(), lr=0.1)):
        assert fixed(torch.rand(4, 1, 6, 6)).shape == (4, 12, 4, 4)
    assert isinstance(ModuleValidator.fix(nn.BatchNorm1d(6)), nn.GroupNorm)
    behind_linear = ModuleValidator.fix(nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32)))
    assert not torch.equal(*(behind_linear(torch.randn(1, 4)) for _ in range(2)))
    assert math.isfinite(float(fixed(torch.rand(2, 1, 6, 6)).sum()))


class Noisy(nn.Module):
    """A model that draws random numbers in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.randn_like(x))


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (nn.Linear(4, 2).double(), X, r"parameters are float64 and its inputs are float32"),
        (nn.Linear(4, 2), X.double(), r"parameters are float32 and its inputs are float64"),
        (Noisy(), X, r"draws random numbers in evaluation mode, too.*self\.training"),
    ],
)
def test_what_a_model_lacks_is_named(model: nn.Module, x: Tensor, message: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        PrivacyEngine(model, 8, 60, noise_multiplier=1.0).attach(optimizer),
        pytest.raises((ValueError, UnsafeModelError), match=message),
    ):
        model(x[:8])


def test_a_lazy_layer_needs_an_example_first() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'0\.weight' of a LazyLinear has no values yet; call"):
        PrivacyEngine(model, 8, 60, noise_multiplier=1.0)
    model(torch.zeros(1, 4))
    PrivacyEngine(model, 8, 60, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from fedsim import PrivacyEngine", "PrivacyEngine"),
        ("from fedsim.clients.utils.batch_memory_manager import *", "BatchMemoryManager"),
        ("from fedsim.clients.validators import ModuleValidator", "ModuleValidator"),
    ],
)
def test_an_import_by_the_path_of_opacus_names_the_line_to_write(line: str, name: str) -> None:
    right = f"from fedsim.clients import {name}"
    with pytest.raises(ImportError, match=f"^write `{right}`$"):
        exec(line)
    exec(right)


def test_the_memory_manager_of_opacus_is_refused_with_the_line_to_write() -> None:
    """A script of which one of two import lines was changed."""
    from opacus.utils.batch_memory_manager import BatchMemoryManager as OfOpacus

    model, optimizer, loader = parts()
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    manager = OfOpacus(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)
    with pytest.raises(AttributeError, match=r"`from fedsim.clients import BatchMemoryManager`"):
        manager.__enter__()
