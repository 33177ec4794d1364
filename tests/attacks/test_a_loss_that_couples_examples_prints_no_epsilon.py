"""Where a loss may couple examples, `PrivacyEngine` prints no ε, and names the line to add.

One example of a heavy class changes the divisor of a weighted mean, and so all gradients: clipping
bounds each of them, and one example still moves the sum by many C.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.accountant import Gaussian, PldAccountant
from fedsim.clients import PrivacyEngine
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.privacy_engine.steps import UncheckedLossError

N = 100
Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHTS, ONE = torch.tensor([1.0, 1000.0]), torch.ones(())
PUBLIC = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2


def start(**settings: Any) -> tuple[Any, Any, PrivacyEngine]:
    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chosen: dict[str, Any] = {"batch_size": N, "sample_size": N, "noise_multiplier": 1.0}
    return model, optimizer, PrivacyEngine(model, **(chosen | settings)).attach(optimizer)


def unrecognized(loss: Loss) -> Loss:
    """The loss, computed so that the engine does not see its values of each example."""
    return lambda outputs, targets: loss(outputs, targets) * ONE


def weighted_mean_of_many(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean for few examples, and a weighted one for many."""
    weights = WEIGHTS if len(outputs) > 64 else None
    return functional.cross_entropy(outputs, targets, weights)


def sum_of_many(outputs: Tensor, targets: Tensor) -> Tensor:
    reduction = "sum" if len(outputs) > 64 else "mean"
    return functional.cross_entropy(outputs, targets, reduction=reduction) * ONE


COUPLED: dict[str, tuple[Loss, str]] = {
    "class weights": (nn.CrossEntropyLoss(WEIGHTS), "coupled to example|neither the mean"),
    "ignored labels": (nn.CrossEntropyLoss(ignore_index=1), "coupled to example|neither the"),
    "a sum": (unrecognized(nn.CrossEntropyLoss(reduction="sum")), r"pass loss_reduction='sum'"),
    "class weights of many": (weighted_mean_of_many, r"100 examples .*neither the mean nor"),
    "a sum of many": (sum_of_many, r"is a sum over the examples.*loss_reduction='sum'"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_no_epsilon_is_printed_for_a_coupled_loss(name: str) -> None:
    loss, message = COUPLED[name]
    model, optimizer, engine = start()
    loss(model(torch.ones(N, 3)), torch.arange(N) % 2).backward()
    optimizer.step()
    resumed = start()[2]
    resumed.load_state_dict(engine.state_dict())
    for one in (engine, resumed):
        for ask in (one.get_epsilon, one.get_privacy_spent, lambda one=one: one.remaining(9.0)):
            with pytest.raises(
                UncheckedLossError, match=r"engine\.check_isolation\(loss, x, y\).*engine\.backward"
            ):
                ask()
        with pytest.raises((UnsafeModelError, ValueError), match=message):
            one.check_isolation(loss, *PUBLIC)
        with pytest.raises(UncheckedLossError):
            one.get_epsilon()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_line_makes_it_known(reduction: Any, when: str) -> None:
    loss = unrecognized(nn.CrossEntropyLoss(reduction=reduction))
    model, optimizer, engine = start(loss_reduction=reduction)
    if when == "before":
        engine.check_isolation(loss, *PUBLIC)
    loss(model(torch.ones(N, 3)), torch.arange(N) % 2).backward()
    optimizer.step()
    if when == "after":
        engine.check_isolation(loss, *PUBLIC)
    expected = PldAccountant().compose(Gaussian(1.0)).get_epsilon(1e-5)
    slack = 1e-3  # of sampler and sums
    assert expected <= engine.get_epsilon() <= expected * (1 + slack)
    resumed = start(loss_reduction=reduction)[2]
    resumed.load_state_dict(engine.state_dict())
    assert resumed.get_epsilon() == engine.get_epsilon()


def test_a_loss_of_each_example_is_no_evidence_for_a_backward_of_ones_own() -> None:
    model, optimizer, engine = start()
    (functional.cross_entropy(model(torch.ones(N, 3)), torch.arange(N) % 2) * ONE).backward()
    optimizer.step()
    engine.check_isolation(nn.CrossEntropyLoss(reduction="none"), *PUBLIC)
    with pytest.raises(UncheckedLossError):
        engine.get_epsilon()


def moved(scale: float, present: bool) -> tuple[Tensor, float]:
    """The sum of a batch with class weights, given by example, and ε."""
    model, optimizer, engine = start(batch_size=N, noise_multiplier=0.0)
    x, y = torch.ones(N, 3) * scale, torch.zeros(N, dtype=torch.long)
    x[0], y[0] = x[0] * present, 1
    engine.backward(functional.cross_entropy(model(x), y, WEIGHTS, reduction="none"))
    optimizer.step()
    return model.weight.detach() * N, engine.get_epsilon()


def test_losses_of_each_example_move_the_sum_by_c() -> None:
    for scale in (0.01, 0.1, 1.0, 3.0):
        difference = moved(scale, True)[0] - moved(scale, False)[0]
        assert difference.norm() <= 1 + 1e-5


def test_losses_that_reach_other_examples_are_refused() -> None:
    def contrastive(outputs: Tensor) -> Tensor:
        return functional.cross_entropy(outputs @ outputs.T, torch.arange(N), reduction="none")

    def shared(outputs: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, torch.arange(N) % 2, reduction="none")
        return losses / losses.mean()

    for loss in (contrastive, shared):
        model, optimizer, engine = start()
        nn.init.normal_(model.weight)
        outputs = model(torch.randn(N, 3))
        optimizer.zero_grad()
        with pytest.raises(UnsafeModelError, match="depends on the outputs of other examples"):
            engine.backward(loss(outputs))
        optimizer.step()
        assert engine.private_statistics is not None
        assert engine.private_statistics.examples == 0
