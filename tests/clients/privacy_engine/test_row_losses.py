"""Losses that scripts reduce themselves: the value of each example is kept, and used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients import PrivacyEngine
from fedsim.clients.privacy_engine.row_losses import ModelOutput
from fedsim.clients.privacy_engine.steps import UncheckedLossError

X = torch.linspace(-1, 1, 32).view(8, 4)
Y, Z = torch.arange(8) % 3, torch.linspace(0.1, 0.9, 24).view(8, 3)
Loss = Callable[[Tensor], Any]


def attached(**settings: Any) -> tuple[nn.Module, Any, PrivacyEngine]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen: dict[str, Any] = {"batch_size": 8, "sample_size": 40, "noise_multiplier": 0.0}
    chosen |= {"max_grad_norm": 0.2}
    engine = PrivacyEngine(model, **(chosen | settings))
    return model, optimizer, engine.attach(optimizer)


def clipped_sum(loss: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The sum of clipped gradients of losses of one example each, by plain autograd."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    total = torch.zeros(15)
    for i in range(8):
        found = torch.autograd.grad(loss(model(X[i : i + 1]), i), list(model.parameters()))
        gradient = torch.cat([part.flatten() for part in found])
        total += gradient * min(1.0, 0.2 / gradient.norm().item())
    return total / 8


def released(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def entropy(o: Tensor, i: int) -> Tensor:
    return functional.cross_entropy(o, Y[i : i + 1])


def square(o: Tensor, i: int) -> Tensor:
    return functional.mse_loss(o, Z[i : i + 1])


KNOWN: dict[str, tuple[Loss, Callable[[Tensor, int], Tensor]]] = {
    "mean": (lambda o: functional.cross_entropy(o, Y), entropy),
    "module": (lambda o: nn.CrossEntropyLoss()(o, Y), entropy),
    "sum, whatever was declared": (
        lambda o: functional.cross_entropy(o, Y, reduction="sum"),
        entropy,
    ),
    "arguments by name": (
        lambda o: functional.nll_loss(
            input=torch.log_softmax(input=o, dim=1), target=Y, reduction="mean"
        ),
        entropy,
    ),
    "log-softmax": (lambda o: functional.nll_loss(functional.log_softmax(o, 1), Y), entropy),
    "mean of a vector": (
        lambda o: functional.cross_entropy(o, Y, reduction="none").mean(),
        entropy,
    ),
    "torch.sum of a vector": (
        lambda o: torch.sum(functional.cross_entropy(o, Y, reduction="none")),
        entropy,
    ),
    "several values": (lambda o: functional.mse_loss(o, Z), square),
    "a number more": (lambda o: 1 + functional.mse_loss(o, Z) + 1, square),
    "a column": (
        lambda o: functional.mse_loss(o[:, 1], Z[:, 1]),
        lambda o, i: functional.mse_loss(o[:, 1], Z[i : i + 1, 1]),
    ),
    "two losses": (
        lambda o: sum([functional.mse_loss(o, Z), functional.cross_entropy(o, Y)]),
        lambda o, i: square(o, i) + entropy(o, i),
    ),
    "logits": (
        lambda o: nn.BCEWithLogitsLoss()(o.squeeze(), Z),
        lambda o, i: functional.binary_cross_entropy_with_logits(o, Z[i : i + 1]),
    ),
    "probabilities": (
        lambda o: functional.binary_cross_entropy(torch.sigmoid(o), Z),
        lambda o, i: functional.binary_cross_entropy_with_logits(o, Z[i : i + 1]),
    ),
    "a row of tokens": (
        lambda o: functional.mse_loss(o.view(-1, 1), Z.view(-1, 1)),
        square,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_each_example_gets_its_own_gradient_and_epsilon_is_known(name: str) -> None:
    loss, alone = KNOWN[name]
    model, optimizer, engine = attached()
    value = loss(model(X))
    assert isinstance(value, ModelOutput)
    value.backward()
    optimizer.step()
    torch.testing.assert_close(released(model), clipped_sum(alone), rtol=0, atol=1e-6)
    engine.get_epsilon()


UNKNOWN: dict[str, Loss] = {
    "own code": lambda o: ((o - Z) ** 2).mean(),
    "divided by the batch's own mean": lambda o: (
        (losses := functional.mse_loss(o, Z, reduction="none")) / losses.detach().mean()
    ).mean(),
    "divided by its own value": lambda o: (loss := functional.mse_loss(o, Z)) / loss.item(),
    "times the size of the batch": lambda o: functional.mse_loss(o, Z) * len(o),
    "outputs divided by the batch's": lambda o: functional.cross_entropy(o / o.detach().norm(), Y),
    "outputs changed in place": lambda o: functional.cross_entropy(o.div_(o.detach().norm()), Y),
    "weights of the batch": lambda o: functional.binary_cross_entropy_with_logits(
        o, Z, pos_weight=(1 - Z).sum() / Z.sum()
    ),
    "a softmax over the examples": lambda o: functional.nll_loss(o.log_softmax(0), Y),
    "rows in another order": lambda o: functional.mse_loss(o[torch.arange(7, -1, -1)], Z),
    "outputs as targets": lambda o: functional.mse_loss(Z, o),
    "class weights": lambda o: functional.cross_entropy(o, Y, torch.tensor([1.0, 5.0, 1.0])),
    "ignored labels": lambda o: functional.cross_entropy(o, Y, ignore_index=2),
    "a product": lambda o: functional.mse_loss(o, Z) * functional.cross_entropy(o, Y),
    "its own square": lambda o: functional.mse_loss(o, Z) ** 2,
    "its inverse": lambda o: torch.div(1.0, functional.mse_loss(o, Z)),
    "a maximum": lambda o: functional.mse_loss(o, Z, reduction="none").max(),
    "a part of the rows": lambda o: functional.mse_loss(o[:5], Z[:5]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_losses_need_the_check(name: str) -> None:
    model, optimizer, engine = attached()
    UNKNOWN[name](model(X) if "in place" not in name else model(X).view(8, 3)).backward()
    optimizer.step()
    with pytest.raises(UncheckedLossError):
        engine.get_epsilon()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_other_losses_are_reduced_as_declared(reduction: str) -> None:
    """A mean that is taken for a sum would move the model too little."""
    model, optimizer, _ = attached(loss_reduction=reduction)
    losses = ((model(X) - Z) ** 2).mean(1)
    getattr(losses, reduction)().backward()
    optimizer.step()
    torch.testing.assert_close(released(model), clipped_sum(square), rtol=0, atol=1e-6)


def test_an_ignored_label_changes_no_other_gradient() -> None:
    """The mean of torch divides by the number of labels that count; here, by all of them."""
    found = []
    for label in (1, -100):
        model, optimizer, engine = attached(max_grad_norm=100.0)
        y = Y.clone()
        y[0] = label
        nn.CrossEntropyLoss()(model(X), y).backward()
        optimizer.step()
        found.append((released(model), engine.get_epsilon()))
    alone = clipped_sum_of_first()
    torch.testing.assert_close(found[0][0] - found[1][0], alone, rtol=0, atol=1e-6)


def clipped_sum_of_first() -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    loss = functional.cross_entropy(model(X[:1]), torch.tensor([1]))
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in found]) / 8


def test_outputs_behave_as_tensors() -> None:
    model, _, _ = attached()
    outputs = model(X)
    assert type(outputs.detach()) is type(outputs * 2) is type(outputs.mean(0)) is Tensor
    assert type(outputs.argmax(1)) is Tensor
    assert outputs.detach().numpy().shape == (8, 3)
    value, place = outputs.max(1)
    assert value.shape == place.shape == (8,)
    loss = functional.cross_entropy(outputs, Y)
    assert isinstance(loss.item(), float)
    assert float(loss) == loss.item()
    loss += torch.ones(())  # a sum with something else
    assert getattr(loss, "losses", None) is None
    with torch.no_grad():
        assert type(model(X)) is Tensor


def test_an_empty_batch_has_a_loss_of_zero() -> None:
    model, optimizer, engine = attached()
    loss = nn.CrossEntropyLoss()(model(X[:0]), Y[:0])
    assert loss.item() == 0.0
    loss.backward()
    optimizer.step()
    assert engine.steps == 1
    engine.get_epsilon()
