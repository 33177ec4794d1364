import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error, r2_score
from torch import nn

from fedsim.data import Examples
from fedsim.models.catalog import ModelError
from fedsim.models.losses import bce, cross_entropy, mse
from fedsim.models.tasks import Classification, Labels, Regression, Targets, evaluate, task_for

N = 101
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 5)).astype(np.float32)


class Identity(nn.Module):
    """Outputs are the features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def run(loss_name: str, targets: Targets, features=X, **options) -> dict[str, float]:
    loss = {"cross_entropy": cross_entropy, "bce": bce, "mse": mse}[loss_name]
    task = task_for(loss_name, targets)
    return evaluate(Identity(), loss, task, Examples(features, targets), **options)


@pytest.mark.parametrize("batch_size", [1, 7, N, 1024])
def test_classification_agrees_with_sklearn(batch_size):
    y = RNG.integers(0, 5, N)
    y[0] = 4
    found = run("cross_entropy", y, batch_size=batch_size)
    probabilities = torch.from_numpy(X).double().softmax(1).numpy()
    assert found["accuracy"] == accuracy_score(y, X.argmax(1))
    assert found["loss"] == pytest.approx(log_loss(y, probabilities, labels=range(5)), rel=1e-6)
    assert {type(value) for value in found.values()} == {float}
    assert set(found) == {"loss", "accuracy"}


@pytest.mark.parametrize("batch_size", [7, N])
@pytest.mark.parametrize("width", [1, 3])
def test_regression_agrees_with_sklearn(batch_size, width):
    y = (RNG.normal(size=(N, width)) * [1, 5, 9][:width] + 1000).astype(np.float32)
    found = run("mse", y, X[:, :width] + 1000, batch_size=batch_size)
    predicted = X[:, :width] + np.float32(1000)
    assert found["mse"] == pytest.approx(mean_squared_error(y, predicted), rel=1e-6)
    assert found["r2"] == pytest.approx(r2_score(y, predicted), rel=1e-6)
    assert found["loss"] == pytest.approx(found["mse"], rel=1e-5)
    assert set(found) == {"loss", "mse", "r2"}


def test_flat_targets_of_one_column_are_not_broadcast():
    y = RNG.normal(size=N).astype(np.float32)
    found = run("mse", y, X[:, :1])
    assert found["r2"] == pytest.approx(r2_score(y, X[:, 0]), rel=1e-6)


def test_whole_number_targets_can_be_regressed_on():
    y = np.arange(N)
    assert run("mse", y, y[:, None].astype(np.float32)) == {"loss": 0, "mse": 0, "r2": 1}


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_r2_of_constant_targets_is_as_in_sklearn(error):
    y = np.full(N, 3, dtype=np.float32)
    found = run("mse", y, y[:, None] + np.float32(error))
    assert found["r2"] == r2_score(y, y + error) == 1 - error


def test_modes_are_restored_and_no_gradient_is_kept():
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(), nn.Linear(5, 2))
    model.train()
    model[0].eval()
    y = np.arange(N) % 2
    data = Examples(X, y)
    first, second = (
        evaluate(model, cross_entropy, task_for("cross_entropy", y), data) for _ in range(2)
    )
    assert first == second
    assert [layer.training for layer in model] == [False, True, True]
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_diverged_model_has_a_loss_that_is_not_finite():
    y = np.zeros(N, dtype=np.float32)

    class Diverged(Identity):
        def forward(self, x):
            return x[:, :1] * torch.inf

    found = evaluate(Diverged(), mse, task_for("mse", y), Examples(X, y))
    assert found["loss"] == np.inf


def test_batches_of_no_examples_are_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        run("mse", np.zeros(N, dtype=np.float32), X[:, :1], batch_size=0)


WHOLE, REAL = np.arange(6), np.linspace(0, 1, 6, dtype=np.float32)


@pytest.mark.parametrize(
    ("loss", "targets", "task"),
    [
        ("cross_entropy", WHOLE, Classification(6)),
        ("./mine.py:loss", WHOLE, Classification(6)),
        ("./mine.py:loss", WHOLE - 3, Regression(1)),
        ("./mine.py:loss", REAL, Regression(1)),
        ("mse", WHOLE, Regression(1)),
        ("mse", REAL[:, None].repeat(3, 1), Regression(3)),
        ("bce", WHOLE % 2, Labels(1)),
        ("bce", np.ones((6, 4), dtype=np.float32), Labels(4)),
    ],
)
def test_loss_and_targets_make_the_task(loss, targets, task):
    assert task_for(loss, targets) == task


def test_the_number_of_classes_may_be_known_from_elsewhere():
    assert task_for("cross_entropy", WHOLE, num_classes=10).num_outputs == 10


@pytest.mark.parametrize(
    ("loss", "targets", "options", "message"),
    [
        ("cross_entropy", REAL, {}, "whole-number targets .* float32"),
        ("cross_entropy", WHOLE - 1, {}, "number them from 0"),
        ("cross_entropy", WHOLE, {"num_classes": 3}, "must be 0, ..., 2, got targets from 0 to 5"),
        ("bce", WHOLE, {}, "targets 0 or 1, got 2"),
        ("bce", REAL, {}, "targets 0 or 1, got 0.2"),
    ],
)
def test_targets_of_another_task_are_refused(loss, targets, options, message):
    with pytest.raises(ModelError, match=message):
        task_for(loss, targets, **options)
