"""Personal models against closed forms."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim.models.losses import mse
from fedsim.personalization.methods import PersonalizationError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = (X @ RNG.normal(size=(3, 1)) + 1.0).astype(np.float32)
CLASSES = np.array([0, 0, 0, 1, 1, 2])


def linear(inputs: int = 3, outputs: int = 1) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs)


def weights(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()


def personal(model: nn.Module, settings: dict[str, Any], **options: Any) -> nn.Module:
    return fedsim.personalize(model, X, Y, settings, loss=mse, **options)


def test_ditto_reaches_the_minimum_of_its_penalised_loss() -> None:
    model, penalty = linear(), 0.7
    settings = {"method": "ditto", "proximal_weight": penalty, "steps": 300, "lr": 0.2}
    design = np.column_stack([X, np.ones(len(X))]).astype(np.float64)
    curvature = 2 / len(X) * design.T @ design + penalty * np.eye(4)
    slope = 2 / len(X) * design.T @ Y.astype(np.float64)[:, 0] + penalty * weights(model)
    expected = np.linalg.solve(curvature, slope)
    np.testing.assert_allclose(weights(personal(model, settings)), expected, atol=1e-5)
    assert np.abs(expected - weights(model)).max() > 0.1, "the penalty alone would also pass"


def test_ditto_lies_between_fine_tuning_and_the_global_model() -> None:
    model, steps = linear(), {"steps": 20, "lr": 0.05, "batch_size": 8}
    tuned = weights(personal(model, {"method": "fine_tune", **steps}))
    free = personal(model, {"method": "ditto", "proximal_weight": 0.0, **steps})
    assert weights(free).tobytes() == tuned.tobytes()
    bound = personal(model, {"method": "ditto", "proximal_weight": 1e9, **steps})
    np.testing.assert_allclose(weights(bound), weights(model), atol=1e-6)


def test_fine_tuning_is_gradient_descent_and_leaves_the_global_model() -> None:
    model = linear()
    before = weights(model)
    w = before.copy()
    design = np.column_stack([X, np.ones(len(X))]).astype(np.float64)
    for _ in range(5):
        w -= 0.1 * 2 / len(X) * design.T @ (design @ w - Y[:, 0])
    found = personal(model, {"method": "fine_tune", "steps": 5, "lr": 0.1})
    np.testing.assert_allclose(weights(found), w, atol=1e-5)
    assert weights(model).tobytes() == before.tobytes()
    assert not found.training


def test_batches_are_those_of_the_seed_and_the_client() -> None:
    def found(**options: int) -> bytes:
        settings = {"method": "fine_tune", "steps": 3, "batch_size": 4}
        return weights(personal(linear(), settings, **options)).tobytes()

    assert found() == found(seed=0, client=0)
    assert len({found(), found(seed=1), found(client=1)}) == 3


def test_only_named_parameters_change() -> None:
    settings = {"method": "fine_tune", "parameters": ["bi*"]}
    model = linear()
    found = personal(model, settings)
    assert torch.equal(found.get_parameter("weight"), model.weight)
    assert not torch.equal(found.get_parameter("bias"), model.bias)
    with pytest.raises(PersonalizationError, match=r"'head\.\*' is no trainable parameter.*weight"):
        personal(model, {"method": "fine_tune", "parameters": ["bias", "head.*"]})


def test_a_label_prior_is_bayes_rule() -> None:
    model, x = linear(3, 3), torch.from_numpy(X[:6])
    settings = {"method": "label_prior", "smoothing": 2.0, "global_prior": [1.0, 1.0, 2.0]}
    found = fedsim.personalize(model, X[:6], CLASSES, settings)
    posterior = torch.softmax(model(x), 1).double()
    own, everybody = torch.tensor([5.0, 4.0, 3.0]) / 12, torch.tensor([1.0, 1.0, 2.0]) / 4
    expected = posterior * own / everybody
    expected /= expected.sum(1, keepdim=True)
    torch.testing.assert_close(torch.softmax(found(x), 1).double(), expected, atol=1e-6, rtol=1e-5)


def test_a_client_like_the_federation_keeps_the_global_model() -> None:
    model, x = linear(3, 3), torch.from_numpy(X[:6])
    found = fedsim.personalize(model, X[:6], [0, 0, 1, 1, 2, 2], {"method": "label_prior"})
    torch.testing.assert_close(found(x), model(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: personal(linear(), {"method": "tune"}), "personalization: Input tag 'tune'"),
        (
            lambda: personal(linear(), {"method": "ditto", "lr": -1.0}),
            "lr: Input should be greater",
        ),
        (lambda: personal(linear(), {"method": "label_prior"}), "one logit for each class"),
        (
            lambda: fedsim.personalize(linear(3, 3), X, CLASSES, {"method": "fine_tune"}),
            "one row for each of at least 1 example, got 40 and 6",
        ),
        (
            lambda: fedsim.personalize(
                linear(3, 3), X[:6], [0, 1, 7] * 2, {"method": "label_prior"}
            ),
            "x needs inputs of the model, and y targets of the loss.* failed with RuntimeError",
        ),
        (
            lambda: fedsim.personalize(linear(), 1.0, Y, {"method": "fine_tune"}),
            "x must have",
        ),
        (
            lambda: fedsim.personalize(linear(), "ab", Y, {"method": "fine_tune"}),
            "of numbers",
        ),
    ],
)
def test_mistakes_are_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PersonalizationError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
