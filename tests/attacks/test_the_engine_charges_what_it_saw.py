"""`PrivacyEngine` charges what came through it: an example moves a sum by C, or nothing does.

Each attack of a caller's loop moves the released sum by more than its charge pays for. It must be
refused before anything is released, or be charged in full.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled
from fedsim.clients import PrivacyEngine
from fedsim.clients.privacy_engine.batch_schedule import BudgetExhaustedError
from fedsim.clients.privacy_engine.loaders import BatchReuseError
from fedsim.clients.privacy_engine.outside_batches import OutsideBatchError

N, C = 20, 1.0
Y = torch.ones(N, 1)


def examples(first: float) -> Tensor:
    """N examples without a gradient, but the first, of a gradient far above C."""
    x = torch.zeros(N, 3)
    x[0, 0] = first
    return x


def start(**settings: Any) -> tuple[Any, Any, PrivacyEngine]:
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chosen = {"batch_size": N, "sample_size": N, "noise_multiplier": 1.0, "max_grad_norm": C}
    engine = PrivacyEngine(model, **(chosen | {"seed": 0} | settings))  # type: ignore[arg-type]
    return model, optimizer, engine.attach(optimizer)


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) ** 2).mean()


Loop = Callable[[nn.Module, Any, Tensor, Tensor], None]


def backward_again(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for _ in range(4):
        squares(model, x, y).backward()
        optimizer.virtual_step()
    optimizer.step()


def rows_again(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    squares(model, torch.cat([x] * 4), torch.cat([y] * 4)).backward()
    optimizer.step()


def step_again(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for _ in range(4):
        squares(model, x, y).backward()
        optimizer.step()


def half_twice(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """Of two parts, the first is not used, and the second one twice: as many examples in all."""
    for _ in range(0 if len(x) == N // 2 and not x.any() else 2):
        squares(model, x, y).backward()
        optimizer.virtual_step()
    optimizer.step()


def some_left_out(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """Whether the others take part depends on one example."""
    chosen = x[:1] if x.abs().max() > 10 else x
    squares(model, chosen, y[: len(chosen)]).backward()
    optimizer.step()


ATTACKS: dict[str, tuple[Loop, str]] = {
    "backward again": (backward_again, r"40 examples came .*of 20.*augmentation_multiplicity=K"),
    "rows again": (rows_again, "80 examples came through"),
    "step again": (step_again, "the batch is released already"),
    "half twice": (half_twice, "0 examples came through"),
    "some left out": (some_left_out, "1 examples came through"),
}


def run(attack: Loop, first: float, **settings: Any) -> tuple[Tensor, float]:
    """Return the released sum and ε of one batch that is all of the data."""
    model, optimizer, engine = start(**settings)
    x = examples(first)
    if settings.get("max_physical_batch"):
        x = x.flip(0)
    engine.check_isolation(nn.MSELoss(), torch.randn(4, 3), torch.randn(4, 1))
    for a, b in engine.batches(x, Y, steps=1):
        attack(model, optimizer, a, b)
    return model.weight.detach().flatten() * N, engine.get_epsilon(1e-5)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_batch_that_the_engine_drew_is_used_once(name: str, sampling: str) -> None:
    settings: dict[str, Any] = {"sampling": sampling}
    if name == "half twice":
        settings["max_physical_batch"] = N // 2
    attack, message = ATTACKS[name]
    with pytest.raises(BatchReuseError, match=message):
        run(attack, 100.0, **settings)


def test_tokens_as_rows_are_refused() -> None:
    data = TensorDataset(torch.zeros(N, 16, 3), torch.ones(N, 16, 1))
    model = nn.Linear(3, 1, bias=False)
    model, optimizer, loader = PrivacyEngine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=N),
        noise_multiplier=1.0,
        max_grad_norm=C,
    )

    def train() -> None:
        for a, b in loader:
            squares(model, a.flatten(0, 1), b.flatten(0, 1)).backward()
            optimizer.step()

    with pytest.raises(BatchReuseError, match=r"320 examples .*of 20.*\(examples, tokens"):
        train()


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_more_rows_than_examples_are_refused(sampling: str) -> None:
    _, _, engine = start(sampling=sampling)
    with pytest.raises(ValueError, match=r"320 rows, of sample_size=20.*\(examples, tokens"):
        next(engine.batches(torch.zeros(N * 16, 3), torch.ones(N * 16, 1)))
    model, optimizer, private = start(batch_size=N, adjacency="add_remove")
    for x, y in private.batches(torch.zeros(N + 5, 3), torch.ones(N + 5, 1), steps=1):
        squares(model, x, y).backward()
        with pytest.raises(OutsideBatchError, match=r"25 examples, of sample_size=20"):
            optimizer.step()
        break


def test_a_forward_pass_of_another_batch_is_refused() -> None:
    model, optimizer, engine = start(batch_size=N // 2, sampling="shuffle")
    kept: list[Tensor] = []

    def train() -> None:
        for x, y in engine.batches(examples(100.0), Y, steps=2):
            kept.append(squares(model, x, y))
            kept.append(squares(model, x, y))
            kept.pop(0).backward()
            optimizer.step()

    with pytest.raises(BatchReuseError, match="before this batch was given out"):
        train()
    assert engine.steps == 1


@pytest.mark.parametrize("views", [2, 8])
def test_views_of_an_example_move_the_sum_by_its_bound(views: int) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        squares(model, *(t.repeat_interleave(views, 0) for t in (x, y))).backward()
        optimizer.step()

    present, epsilon = run(train, 100.0, augmentation_multiplicity=views)
    absent, _ = run(train, 0.0, augmentation_multiplicity=views)
    assert 0.99 * C < (present - absent).norm() <= C * (1 + 1e-5)
    assert epsilon == run(step_once, 0.0)[1]


@pytest.mark.parametrize("own", [True, False])
def test_views_in_passes_of_their_own_are_refused(own: bool) -> None:
    """Four passes of one view have as many rows as one of four views, of different examples."""
    model, optimizer, engine = start(augmentation_multiplicity=4)
    x = examples(100.0)
    batches = engine.batches(x, Y, steps=1) if own else [(x, Y)]

    def train() -> None:
        for a, b in batches:
            for _ in range(4):
                squares(model, a, b).backward()
                optimizer.virtual_step()
            optimizer.step()

    refusal = (
        (BatchReuseError, r"views of 5 examples .*of 20") if own else (OutsideBatchError, "views")
    )
    with pytest.raises(refusal[0], match=refusal[1]):
        train()
    assert not len(engine.ledger)


def step_once(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    squares(model, x, y).backward()
    optimizer.step()


# --- batches from outside -------------------------------------------------------------------------


def batches(size: int, population: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = TensorDataset(torch.randn(population, 3), torch.randn(population, 1))
    yield from DataLoader(data, batch_size=size, shuffle=True)


@pytest.mark.parametrize(("size", "population"), [(2, 1000), (32, 1000), (1, 60), (64, 600)])
def test_no_batch_from_outside_is_printed_with_an_amplified_epsilon(
    size: int, population: int
) -> None:
    model, optimizer, engine = start(batch_size=size, sample_size=population)
    engine.check_isolation(nn.MSELoss(), torch.randn(4, 3), torch.randn(4, 1))
    for step, (x, y) in zip(range(1, 5), batches(size, population), strict=False):
        step_once(model, optimizer, x, y)
        known = PldAccountant().compose(Gaussian(1.0), step).get_epsilon(1e-5)
        assert engine.get_epsilon(1e-5) >= known
        assert engine.ledger.entries[0][1] == step, "the event at the moment of the charge stays"


def test_an_engine_made_anew_each_round_claims_no_amplification() -> None:
    """Four equal batches a round never give a test of sizes enough to see."""
    spent = []
    for _ in range(3):
        model, optimizer, engine = start(batch_size=15, sample_size=60)
        engine.check_isolation(nn.MSELoss(), torch.randn(4, 3), torch.randn(4, 1))
        for x, y in batches(15, 60):
            step_once(model, optimizer, x, y)
        spent.append(engine.get_epsilon(1e-5))
    amplified = PldAccountant().compose(PoissonSampled(0.25, Gaussian(1.0)), 4).get_epsilon(1e-5)
    assert min(spent) >= PldAccountant().compose(Gaussian(1.0), 1).get_epsilon(1e-5)
    assert min(spent) > 1.5 * amplified


@pytest.mark.parametrize("way", [backward_again, rows_again])
def test_a_batch_from_outside_is_used_once(way: Loop) -> None:
    model, optimizer, _ = start(batch_size=4)
    with pytest.raises(
        OutsideBatchError, match=r"16 examples .*of batch_size=4.*augmentation_multiplicity=K"
    ):
        way(model, optimizer, examples(100.0)[:4], Y[:4])


def test_batches_from_outside_have_no_claim_under_a_target_or_private_sizes() -> None:
    target = {"noise_multiplier": None, "target_epsilon": 3.0, "steps": 4}
    for settings, why in ((target, "calibrated"), ({"adjacency": "add_remove"}, "add_remove")):
        model, optimizer, engine = start(batch_size=4, **settings)
        squares(model, examples(1.0)[:4], Y[:4]).backward()
        with pytest.raises(OutsideBatchError, match=rf"{why}.*batches='poisson'"):
            optimizer.step()
        assert not len(engine.ledger)
        assert not model.weight.any(), "nothing was released"


# --- passes beyond the plan --------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
def test_passes_beyond_the_plan_are_refused(own: bool) -> None:
    model, optimizer, engine = start(
        batch_size=4, sampling="shuffle", noise_multiplier=None, target_epsilon=2.0, epochs=2
    )
    engine.check_isolation(nn.MSELoss(), torch.randn(4, 3), torch.randn(4, 1))

    def train() -> None:
        for _ in range(10):  # one batch of each pass: 10 steps are planned
            if own:
                for x, y in engine.batches(examples(1.0), Y, steps=1):
                    step_once(model, optimizer, x, y)
            engine.begin_epoch()
            if not own:
                step_once(model, optimizer, examples(1.0)[:4], Y[:4])

    with pytest.raises(BudgetExhaustedError, match=r"2 passes .*more epochs"):
        train()
    assert math.isclose(engine.get_epsilon(), 2.0, rel_tol=1e-2)
    assert engine.get_epsilon() <= 2.0
