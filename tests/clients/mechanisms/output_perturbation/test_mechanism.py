"""Output perturbation: the sensitivity of the descent that runs, its refusals and its release."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.accountant import Gaussian
from fedsim.clients.mechanisms.bounded_examples import BoundedExamples
from fedsim.clients.mechanisms.kinds import LOSSES, LossName
from fedsim.clients.mechanisms.output_perturbation import (
    ConvexProblem,
    Descent,
    OutputMechanism,
    train,
)
from fedsim.noise.sources import DEVIATION, SeededNoise

N, D, K, R, Y = 12, 3, 2, 1.5, 2.0


def descent_of(
    loss: LossName, *, bias: bool, batch: int = N, steps: int = 9, decay: float = 0.3
) -> Descent:
    bounds = BoundedExamples(loss, D, K, R, Y if loss == "mse" else None)
    problem = ConvexProblem(bounds, bias=bias)
    rate = 2.0 / (problem.smoothness + 2.0 * decay)
    return Descent(problem, rate, decay, steps, batch, N)


def targets_of(loss: LossName, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    if loss == "cross_entropy":
        return torch.randint(K, (N,), generator=generator)
    if loss == "bce":
        return torch.randint(2, (N, K), generator=generator).double()
    return scale * torch.randn(N, K, generator=generator, dtype=torch.float64)


def result(descent: Descent, x: Tensor, y: Tensor, start: Tensor, order: np.ndarray) -> Tensor:
    return train(start, x, y, descent, order=order, steps=descent.steps)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("bias", "batch"), [(False, N), (True, 5)])
def test_no_example_moves_the_result_further_than_proven(
    loss: LossName, bias: bool, batch: int
) -> None:
    """Guarantee: with an example removed (zero_out) or replaced, from any start in the ball."""
    descent, order = descent_of(loss, bias=bias, batch=batch), np.arange(N)[::-1]
    largest = 0.0
    for seed in range(12):
        draw = torch.Generator().manual_seed(seed)
        x = 10.0 ** (seed % 3) * torch.randn(N, D, generator=draw, dtype=torch.float64)
        y = targets_of(loss, draw, scale=10.0 ** (seed % 2))
        start = torch.randn(descent.problem.size, generator=draw, dtype=torch.float64)
        start *= (seed % 4) / 3.0 * descent.radius / start.norm()
        whole = result(descent, x, y, start, order)
        for example in range(0, N, 3):
            without, other = x.clone(), x.clone()
            without[example] = torch.nan  # it contributes exactly 0
            other[example] = -100.0 * x[example]
            for changed, factor in ((without, 1.0), (other, 2.0)):
                moved = float((result(descent, changed, y, start, order) - whole).norm())
                largest = max(largest, moved / (factor * descent.sensitivity))
    assert largest <= 1.0
    assert largest > 0.05  # of mse the bound holds for the whole ball, which is far


def test_the_bound_is_met_by_the_worst_example() -> None:
    """All other examples are zeros, and one of the largest norm has the largest gradient."""
    descent = replace(descent_of("bce", bias=False, decay=1e-3), learning_rate=1e-3, steps=40)
    x, y = torch.zeros(N, D, dtype=torch.float64), torch.ones(N, K, dtype=torch.float64)
    start = torch.zeros(descent.problem.size, dtype=torch.float64)
    x[0, 0] = R
    moved = float(result(descent, x, y, start, np.arange(N)).norm())
    assert 0.49 * descent.sensitivity < moved < descent.sensitivity  # the gradient at 0 is half


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_those_of_torch(loss: LossName) -> None:
    descent = descent_of(loss, bias=True, batch=5, steps=7)
    draw = torch.Generator().manual_seed(1)
    x = 0.3 * torch.randn(N, D, generator=draw, dtype=torch.float64)
    y = targets_of(loss, draw, scale=0.3)
    order = np.random.default_rng(2).permutation(N)
    layer = torch.nn.Linear(D, K).double()
    with torch.no_grad():
        flat = torch.cat([layer.weight.flatten(), layer.bias])
    losses = {
        "cross_entropy": lambda o, t: F.cross_entropy(o, t, reduction="none"),
        "bce": lambda o, t: F.binary_cross_entropy_with_logits(o, t, reduction="none").mean(1),
        "mse": lambda o, t: (o - t).square().mean(1),
    }
    for step in range(7):
        batch = order[step % 3 * 5 : step % 3 * 5 + 5].copy()
        mean = losses[loss](layer(x[batch]), y[batch]).sum() / 5
        gradients = torch.autograd.grad(mean, list(layer.parameters()))
        with torch.no_grad():  # torch.optim would import torch's compiler
            for value, gradient in zip(layer.parameters(), gradients, strict=True):
                value -= descent.learning_rate * (gradient + descent.weight_decay * value)
    expected = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
    found = train(flat.detach(), x, y, descent, order=order, steps=7)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_sensitivity_of_fixed_numbers() -> None:
    """G / (n λ) (1 − (1 − η λ)^T) for all examples in every step, and the sum for batches."""
    whole = descent_of("cross_entropy", bias=True)
    gradient, c = math.sqrt(2.0 * (R**2 + 1.0)), 1.0 - whole.learning_rate * 0.3
    assert whole.sensitivity == pytest.approx(gradient / (N * 0.3) * (1.0 - c**9), rel=1e-8)
    batches = replace(whole, batch=5, steps=7)  # an example is in 3 of 7 steps, 3 steps apart
    terms = 1.0 + c**3 + c**6
    expected = whole.learning_rate * gradient / 5 * terms
    assert batches.sensitivity == pytest.approx(expected, rel=1e-8)
    assert whole.error < 1e-9 * whole.sensitivity


def test_what_has_no_proof_is_refused() -> None:
    good = descent_of("cross_entropy", bias=False)
    with pytest.raises(ValueError, match="not strongly convex"):
        replace(good, weight_decay=0.0)
    with pytest.raises(ValueError, match="no sensitivity is proven"):
        replace(good, learning_rate=good.largest_rate * 1.001)
    with pytest.raises(ValueError, match="needs max_target_norm"):
        BoundedExamples("mse", D, K, R)


def test_a_release_is_whole_numbers_of_the_grid_and_charged_with_less_noise() -> None:
    descent = descent_of("cross_entropy", bias=False)
    mechanism = OutputMechanism(1.3).for_training(descent, torch.float32)
    start = torch.zeros(descent.problem.size)
    x, y = torch.randn(N, D), torch.randint(K, (N,))
    order = np.arange(N)
    noise = SeededNoise(bytes(32))
    released = mechanism.release_model(start, x, y, noise, order=order, steps=9)
    steps = released / (mechanism.deviation / DEVIATION)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    assert mechanism.deviation == 1.3 * descent.sensitivity
    effective = mechanism.effective_noise_multiplier
    assert 1.3 * (1 - 1e-5) < effective < 1.3
    assert mechanism.charges(4, 2) == [(Gaussian(effective), 2)]
    assert mechanism.with_effective_noise(1.3).effective_noise_multiplier >= 1.3


def test_without_noise_the_trained_model_is_released_and_charged_infinite() -> None:
    descent = descent_of("cross_entropy", bias=False)
    mechanism = OutputMechanism(0.0).for_training(descent, torch.float32)
    start, order = torch.zeros(descent.problem.size), np.arange(N)
    x, y = torch.randn(N, D), torch.randint(K, (N,))
    noise = SeededNoise(bytes(32))
    released = mechanism.release_model(start, x, y, noise, order=order, steps=9)
    assert torch.equal(released, train(start.double(), x, y, descent, order=order, steps=9))
    assert mechanism.charges(0, 1) == [(Gaussian(0.0), 1)]
