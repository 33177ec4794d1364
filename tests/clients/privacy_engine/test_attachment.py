"""An attached model: every way to run it gives each example's own clipped gradient."""

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from fedsim.clients import PrivacyEngine
from fedsim.clients.gradients.per_example import UncoveredParameterError
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.privacy_engine.recorded_pass import BackwardError

X, Y = torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 3


class Wrapped(nn.Module):
    """A model that is no sequence."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class OwnParameters(nn.Module):
    """Parameters of the root module, and one that a function gets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, -1.5, 2.0]))
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.linear.weight.tanh(), self.linear.bias) * self.scale


class Recurrent(nn.Module):
    """A recurrent layer over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 3, 2))[0][:, -1])


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 3), nn.Tanh()))


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def with_units() -> nn.Sequential:
    return nn.Sequential(
        weight_norm(nn.Linear(6, 4)),
        nn.Unflatten(1, (4, 1)),
        nn.Conv1d(4, 4, 1, groups=2),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Linear(6, 3),
    "sequence": layers,
    "no sequence": lambda: Wrapped(layers()),
    "convolutions": convolutions,
    "units": with_units,
    "own parameters": OwnParameters,
    "recurrent": Recurrent,
}


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[kind]().to(dtype)


def attached(model: nn.Module, **settings: Any) -> tuple[Any, PrivacyEngine]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chosen: dict[str, Any] = {"batch_size": 8, "sample_size": 40, "noise_multiplier": 0.0}
    chosen["max_grad_norm"] = 0.2
    engine = PrivacyEngine(model, **(chosen | settings))
    return optimizer, engine.attach(optimizer)


def released(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, bound: float) -> Tensor:
    """The sum of clipped gradients, one example at a time by plain autograd."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=x.dtype)
    for i in range(len(x)):
        loss = functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([part.flatten() for part in found])
        total += gradient * min(1.0, bound / gradient.norm().item())
    return total


@pytest.mark.parametrize(
    ("kind", "reduction"),
    [*((kind, "mean") for kind in MODELS), ("sequence", "sum"), ("units", "sum")],
)
def test_each_example_adds_its_own_clipped_gradient(kind: str, reduction: str) -> None:
    model, x = model_of(kind), X.double()
    expected = clipped_sum(model, x, Y, 0.2) / 8
    optimizer, engine = attached(model, loss_reduction=reduction)
    functional.cross_entropy(model(x), Y, reduction=reduction).backward()
    optimizer.step()
    torch.testing.assert_close(released(model), expected, rtol=0, atol=1e-7)
    assert engine.private_statistics is not None
    assert engine.private_statistics.examples == 8


def mean_of_views(model: nn.Module, x: Tensor, y: Tensor, views: int, bound: float) -> Tensor:
    """The sum over examples of clipped means over views, one row at a time by plain autograd."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=x.dtype)
    for i in range(0, len(x), views):
        losses = [
            functional.cross_entropy(model(x[j : j + 1]), y[j : j + 1]) for j in range(i, i + views)
        ]
        found = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        gradient = torch.cat([part.flatten() for part in found])
        total += gradient * min(1.0, bound / gradient.norm().item())
    return total


def run_backward(engine: PrivacyEngine, way: str, outputs: Tensor, y: Tensor, views: int) -> None:
    if way in ("mean", "sum"):
        functional.cross_entropy(outputs, y, reduction=way).backward()
    else:
        losses = functional.cross_entropy(outputs, y, reduction="none")
        engine.backward(losses if way == "rows" else losses.view(-1, views).mean(1))


WAYS = ("mean", "sum", "rows", "examples")
OTHERS = MODELS.keys() - {"sequence"}


@pytest.mark.parametrize(
    ("kind", "way"),
    [*product(["sequence"], WAYS), *zip(sorted(OTHERS), cycle(WAYS), strict=False)],
)
def test_views_are_averaged_before_the_clip(kind: str, way: str) -> None:
    """Views of four examples, by each way to run backward, in padded batches of 8 and of 1.

    The views of an example differ much, so that a mean of clipped views is another vector.
    """
    model, views = model_of(kind), 2
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = mean_of_views(model, x, Y, views, 0.2) / 8
    apart = clipped_sum(model, x, Y, 0.2) / 8 / views
    optimizer, engine = attached(
        model,
        augmentation_multiplicity=views,
        max_physical_batch=1 if way in ("sum", "examples") else None,
        loss_reduction="sum" if way == "sum" else "mean",
    )
    run_backward(engine, way, model(x), Y, views)
    optimizer.step()
    torch.testing.assert_close(released(model), expected, rtol=0, atol=1e-7)
    assert (released(model) - apart).norm() > 1e-3
    assert engine.private_statistics is not None
    assert engine.private_statistics.examples == 4


def test_rows_that_are_no_whole_examples_are_refused() -> None:
    model = model_of("sequence")
    attached(model, augmentation_multiplicity=3)
    with pytest.raises(
        BackwardError, match=r"got 8 rows, and augmentation_multiplicity=3 means 3 rows"
    ):
        model(X.double())


@pytest.mark.parametrize(
    ("kind", "declared", "n"),
    [*((kind, "sum", 7) for kind in MODELS), ("sequence", "mean", 1), ("units", "mean", 1)],
)
def test_losses_of_each_example_need_no_reduction(kind: str, declared: str, n: int) -> None:
    model, x = model_of(kind), X.double()[:n]
    expected = clipped_sum(model, x, Y[:n], 0.2) / 8
    optimizer, engine = attached(model, loss_reduction=declared)
    engine.backward(functional.cross_entropy(model(x), Y[:n], reduction="none"))
    optimizer.step()
    torch.testing.assert_close(released(model), expected, rtol=0, atol=1e-7)


def test_losses_that_are_not_of_each_example_are_refused() -> None:
    model = model_of("sequence")
    _, engine = attached(model)
    outputs = model(X.double())
    losses = functional.cross_entropy(outputs, Y, reduction="none")
    for wrong in (losses.mean(), losses.view(2, 4)):
        with pytest.raises(ValueError, match=r"one loss for each example \(n,\)"):
            engine.backward(wrong)


class Heads(nn.Module):
    """Two outputs, each of which may have a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x)[:, 0], self.two(x)[:, 0]


@pytest.mark.parametrize("attack", ["fewer losses", "two ways"])
def test_losses_of_several_kinds_are_refused(attack: str) -> None:
    model = Heads().double()
    optimizer, engine = attached(model)
    one, two = model(X.double())
    engine.backward(one[:5] if attack == "fewer losses" else one)
    if attack == "two ways":
        (two.mean() * torch.ones(())).backward()
    with pytest.raises(BackwardError, match="with one loss for each example"):
        optimizer.step()
    assert engine.steps == 0
    for value in model(X.double()):
        engine.backward(value)
    optimizer.step()
    assert engine.steps == 1


@pytest.mark.parametrize("kind", MODELS)
def test_empty_batches_run_and_add_nothing(kind: str) -> None:
    model = model_of(kind)
    optimizer, engine = attached(model)
    for n in (0, 8, 0):
        before = engine.steps
        optimizer.zero_grad()
        functional.cross_entropy(model(X.double()[:n]), Y[:n]).backward()
        optimizer.step()
        assert engine.steps == before + 1
        assert bool((released(model) != 0).any()) == (n > 0)


def test_a_sequence_that_changes_after_its_check_runs_as_it_is() -> None:
    model, other, x = layers().double(), layers().double(), X.double()
    other.load_state_dict(model.state_dict())
    optimizer, _ = attached(model)
    model(x)
    model[1], other[1] = nn.Sigmoid(), nn.Sigmoid()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    functional.cross_entropy(model(x), Y).backward()
    optimizer.step()
    assert seen
    torch.testing.assert_close(
        released(model), clipped_sum(other, x, Y, 0.2) / 8, rtol=0, atol=1e-7
    )


def test_a_sequence_runs_by_hand_and_other_models_by_autograd() -> None:
    for kind, by_hand in (("sequence", True), ("no sequence", False)):
        model = model_of(kind)
        attached(model)
        for n in (3, 8):
            outputs = model(X.double()[:n])
            assert outputs.shape == (n, 3)
            ran = outputs.grad_fn.next_functions[0][0]  # before the output noted its origin
            assert (type(ran).__name__ == "_RunSequenceBackward") == by_hand


@pytest.mark.parametrize("kind", ["sequence", "no sequence"])
def test_inputs_may_need_gradients(kind: str) -> None:
    model = model_of(kind)
    x = X.double().requires_grad_()
    (expected,) = torch.autograd.grad(functional.cross_entropy(model(x), Y), x)
    attached(model)
    (found,) = torch.autograd.grad(functional.cross_entropy(model(x), Y), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["sequence", "no sequence", "units"])
def test_no_example_counts_twice(kind: str) -> None:
    model = model_of(kind)
    optimizer, engine = attached(model)
    value = functional.cross_entropy(model(X.double()), Y)
    value.backward(retain_graph=True)

    def again() -> None:
        value.backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="backward ran twice"):
        again()
    assert engine.steps == 0


def test_other_arguments_reach_units_row_by_row() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, *, weights: Tensor) -> Tensor:
            return self.linear(x) * self.scale * weights

    class Bound(nn.Module):
        def __init__(self, inner: nn.Module, weights: Tensor) -> None:
            super().__init__()
            self.inner, self.weights = inner, weights

        def forward(self, x: Tensor) -> Tensor:
            own = self.weights[(X.double() == x[:1]).all(1)] if len(x) == 1 else self.weights
            return self.inner(x, weights=own)

    model, weights = Two().double(), torch.linspace(0.1, 2, 8, dtype=torch.float64).view(8, 1)
    expected = clipped_sum(Bound(model, weights), X.double(), Y, 0.2) / 8
    optimizer, _ = attached(model)
    functional.cross_entropy(model(X.double(), weights=weights), Y).backward()
    optimizer.step()
    torch.testing.assert_close(released(model), expected, rtol=0, atol=1e-7)


class WithTable(nn.Module):
    """Adds a row of a table, which is no input's row, and scales by an input with rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, batch: dict[str, Tensor], table: Tensor) -> dict[str, Any]:
        outputs = self.linear(batch["x"]) * batch["scale"] + table[0]
        return {"logits": outputs, "name": "logits", "parts": (outputs[:, 0],)}


@pytest.mark.parametrize("most", [None, 1])
def test_arguments_with_rows_are_cut_and_others_given_whole(most: int | None) -> None:
    """The table is as long as the second batch, so its length does not tell."""
    model, table = WithTable().double(), torch.linspace(0, 1, 9).view(3, 3).double()
    optimizer, engine = attached(model, max_physical_batch=most)
    for n in (5, 3, 8):
        x, scale = X.double()[:n], torch.linspace(0.1, 2, n, dtype=torch.float64).view(n, 1)
        found = model({"x": x, "scale": scale}, table)
        with torch.no_grad():
            expected = model.linear(x) * scale + table[0]
        torch.testing.assert_close(found["logits"].detach(), expected)
        torch.testing.assert_close(found["parts"][0].detach(), expected[:, 0])
        assert found["name"] == "logits"
        engine.backward(functional.cross_entropy(found["logits"], Y[:n], reduction="none"))
        optimizer.step()
    with pytest.raises(UncoveredParameterError, match=r"shape \(1, 1\) for 4 rows; it had a row"):
        model({"x": X.double()[:4], "scale": torch.ones(1, 1).double()}, table)


def test_outputs_without_a_row_for_each_example_are_refused() -> None:
    class Balanced(Wrapped):
        def forward(self, x: Tensor) -> Any:
            outputs = self.inner(x)
            return outputs, outputs.detach().mean(0)

    model = Balanced(nn.Linear(6, 3))
    attached(model)
    with pytest.raises(UnsafeModelError, match=r"a tensor of shape \(3,\) for 16 rows: it has no"):
        model(X)


# --- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "step_inside"), [*((kind, False) for kind in MODELS), ("convolutions", True)]
)
def test_under_autocast_activations_are_short_and_sums_are_not(
    kind: str, step_inside: bool
) -> None:
    model = model_of(kind, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            model(X)
        except RuntimeError as error:  # torch has no recurrent layers of short types everywhere
            pytest.skip(f"torch alone cannot run this model: {error}")
        expected = clipped_sum(model, X, Y, 0.2) / 8
    optimizer, _ = attached(model)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(X)
        functional.cross_entropy(outputs, Y).backward()
        if step_inside:
            optimizer.step()
    if not step_inside:
        optimizer.step()
    found = released(model)
    assert found.dtype == torch.float32
    assert kind == "own parameters" or outputs.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("kind", MODELS)
def test_under_autocast_no_example_adds_more_than_its_bound(kind: str) -> None:
    model = model_of(kind, torch.float32)
    optimizer, _ = attached(model, batch_size=1, max_grad_norm=0.01)
    for i in range(0, 8, 2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(X[i : i + 1]), Y[i : i + 1])
        loss.backward()
        optimizer.step()
        assert 0.0099 < released(model).double().norm() <= 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_parameters_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=rf"float32 or float64, got {str(dtype)[6:]}.*torch\.autocast"
    ):
        attached(layers().to(dtype))
