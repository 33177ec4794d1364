"""Output perturbation: a model trained without noise, and one Gaussian release of it a round.

| case                          | release                                | event                |
|-------------------------------|----------------------------------------|----------------------|
| an example is NaN or infinite | that example contributes exactly 0     | the same             |
| z = 0                         | the trained model, off the grid        | Gaussian(0): ε is ∞  |
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedsim.accountant import Event, Gaussian
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.bounded_examples import bounded_rows
from fedsim.clients.mechanisms.contract import ModelRelease
from fedsim.clients.mechanisms.noise_range import NoiseRangeError, check_deviations
from fedsim.clients.mechanisms.output_perturbation.problem import ConvexProblem, Descent
from fedsim.clients.sampling.sampling import Charges
from fedsim.noise.grid import DEVIATION, SATURATION, effective_multiplier
from fedsim.noise.release import release_
from fedsim.noise.sources import NoiseSource


@dataclass(frozen=True)
class OutputMechanism(ModelRelease):
    """θ + N(0, (z Δ)²): the result θ of `Descent` with noise for its sensitivity Δ, on the grid.

    Guarantee: a release is `mechanism` under zero_out and replace_one, adaptively in the model that
    it starts from: what it starts from is public, and neither Δ nor the noise depends on it.

    Proof. The release adds noise of deviation 2²⁴ to rint(x), x = (θ − start) 2²⁴ / (z Δ). Under
    zero_out two results differ by at most Δ + 2 E (`Descent`, with its rounding E), so the rounded
    vectors of d values differ by at most 2²⁴ (1 + 2 E / Δ) / z + √d. `effective_multiplier` divides
    by 1 + 2 e + z √d 2⁻²⁴ with e = E / Δ, which is the same. Replace-one allows twice that, as its
    Gaussian does. ∎

    Attributes:
        noise_multiplier: z.
        descent: the training and its sensitivity; None: not known, and the grid takes nothing.
    """

    noise_multiplier: float
    descent: Descent | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be finite, got {self.noise_multiplier!r}")

    @property
    def mechanism(self) -> Event:
        """The release of a round."""
        return Gaussian(self.effective_noise_multiplier)

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier z' ≤ z, which rounding leaves."""
        if self.descent is None:
            return self.noise_multiplier
        relative = self.descent.error / self.descent.sensitivity
        return effective_multiplier(self.noise_multiplier, self.descent.problem.size, relative)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise of each trained value: z Δ.

        Raises:
            ValueError: the training is not known.
        """
        if self.descent is None:
            raise ValueError("the sensitivity of an unknown training is not known")
        return self.noise_multiplier * self.descent.sensitivity

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return (event, count) for releases of a client, one for each round.

        Args:
            first_step: releases before; they change nothing.
            steps: number of further releases.
            noise_factor: noise of what is seen over the noise of the release; 1 in local trust.
        """
        noise = noise_factor * self.effective_noise_multiplier
        return [(Gaussian(noise), steps)] if steps else []

    def release_variance(
        self, parameters: FlatParameters, lr: float | None, round_steps: int
    ) -> float | None:
        """Return the expected squared length of the noise of a round in a model."""
        return None if self.descent is None else parameters.size * self.deviation**2

    def for_training(self, descent: Descent, dtype: torch.dtype) -> Self:
        """Return the mechanism of a client's training.

        Args:
            descent: the training.
            dtype: type of the model.

        Raises:
            NoiseRangeError: the type cannot hold the noise, or the grid is too coarse.
        """
        found = replace(self, descent=descent)
        if self.noise_multiplier:
            check_deviations((found.deviation,), dtype, "noise_multiplier · sensitivity")
            if found.deviation * SATURATION / DEVIATION < 2.0 * descent.radius:
                raise NoiseRangeError(
                    f"noise_multiplier {self.noise_multiplier:.3g} is too small for the grid; set "
                    "a larger one, or 0 for no privacy"
                )
        return found

    def release_model(
        self,
        start: Tensor,
        features: Tensor,
        targets: Tensor,
        noise: NoiseSource,
        *,
        order: np.ndarray,
        steps: int,
    ) -> Tensor:
        """Return the noisy model of a client, float64 (size,).

        Guarantee: with noise, the result is a function of the start, projected into the ball of the
        training, and of whole numbers of the grid: the rounded difference of the trained model to
        that start, plus the draws of the source.

        Args:
            start: values of the global model (size,), weights before biases.
            features: the client's examples (n, ...).
            targets: their targets (n, ...).
            noise: the client's own.
            order: the positions 0 ... n − 1 in the order of the batches, drawn without examples.
            steps: T of the training, or 0 for a probe of the noise.

        Raises:
            ValueError: the training is not known.
        """
        descent = self.descent
        if descent is None:
            raise ValueError("a release needs the training whose sensitivity is known")
        begin = _project(start.double(), descent.radius)
        trained = train(begin, features, targets, descent, order=order, steps=steps)
        row = (trained - begin).unsqueeze(0)
        z = self.noise_multiplier
        length = self.deviation / DEVIATION if z else 1.0
        row = row / length
        release_(row, [noise if z else None], [(slice(0, row.shape[1]), row.new_ones(1, 1))], row)
        return begin + row[0] * length


def train(
    start: Tensor,
    features: Tensor,
    targets: Tensor,
    descent: Descent,
    *,
    order: np.ndarray,
    steps: int,
) -> Tensor:
    """Return the result of `Descent` from the start, without noise, float64 (size,).

    Args:
        start: in the ball of the training, float64 (size,).
        features: (n, ...).
        targets: (n, ...).
        descent: loss, rates and batches.
        order: as `OutputMechanism.release_model`.
        steps: number of steps.
    """
    problem = descent.problem
    x, valid = bounded_rows(features, problem.examples.max_feature_norm)
    if problem.bias:
        x = torch.cat([x, valid.to(x).unsqueeze(1)], dim=1)
    y, labelled = problem.examples.target_rows(targets)
    x = x * labelled.to(x).unsqueeze(1)  # a gradient is a residual times x̃
    places = torch.from_numpy(np.ascontiguousarray(order)).to(x.device)
    x, y = x[places], y[places]
    weights = _matrix(start, problem)
    for step in range(steps):
        first = step % descent.num_batches * descent.batch
        batch = slice(first, first + descent.batch)
        gradient = _residuals(x[batch] @ weights.T, y[batch], problem).T @ x[batch]
        gradient = gradient / descent.batch + descent.weight_decay * weights
        weights = _project(weights - descent.learning_rate * gradient, descent.radius)
    return _flat(weights, problem)


def _residuals(outputs: Tensor, targets: Tensor, problem: ConvexProblem) -> Tensor:
    """Return the gradient of each example's loss at its outputs (b, k)."""
    match problem.examples.loss:
        case "cross_entropy":
            return torch.softmax(outputs, dim=1) - targets
        case "bce":
            return (torch.sigmoid(outputs) - targets) / problem.examples.targets
        case "mse":
            return (outputs - targets) * (2.0 / problem.examples.targets)


def _matrix(flat: Tensor, problem: ConvexProblem) -> Tensor:
    """Return the weights (k, d), with the biases as a last column where there are any."""
    k, d = problem.examples.targets, problem.examples.features
    weights = flat[: k * d].view(k, d)
    return torch.cat([weights, flat[k * d :].view(k, 1)], dim=1) if problem.bias else weights


def _flat(weights: Tensor, problem: ConvexProblem) -> Tensor:
    d = problem.examples.features
    return torch.cat([weights[:, :d].reshape(-1), weights[:, d:].reshape(-1)])


def _project(weights: Tensor, radius: float) -> Tensor:
    norm = float(weights.norm())
    return weights * (radius / norm) if norm > radius else weights
