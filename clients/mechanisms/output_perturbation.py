"""Output perturbation: a model trained without noise, and one Gaussian release of it a round.

The training problem is strongly convex, which bounds what one example moves its result by.

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
from fedsim.clients.mechanisms.bounded_examples import BoundedExamples, bounded_rows
from fedsim.clients.mechanisms.contract import ModelRelease
from fedsim.clients.mechanisms.dp_sgd.draft import whole_round_steps
from fedsim.clients.mechanisms.noise_range import NoiseRangeError, check_deviations
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, check_draws, draft_of_bounded
from fedsim.clients.sampling.sampling import Charges
from fedsim.noise.grid import DEVIATION, SATURATION, effective_multiplier
from fedsim.noise.release import release_
from fedsim.noise.sources import NoiseSource

_ROUNDED_UP = 1.0 + 2.0**-30  # more than clipping features in float64 may leave of a norm too much
_UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True)
class ConvexProblem:
    """A linear model under a convex loss of bounded examples.

    An example has features x of L2 norm at most R, with a further 1 where the model has a bias, so
    that x̃ has norm at most R̃. The weights W are one matrix, and the k outputs are W x̃.

    Attributes:
        examples: sizes and bounds of an example, and the loss.
        bias: whether the model has a bias.
    """

    examples: BoundedExamples
    bias: bool

    @property
    def size(self) -> int:
        """Number of trained values."""
        return self.examples.targets * (self.examples.features + self.bias)

    @property
    def input_norm(self) -> float:
        """R̃: L2 bound of x̃."""
        return math.hypot(self.examples.max_feature_norm * _ROUNDED_UP, float(self.bias))

    @property
    def start_gradient(self) -> float:
        """G₀: bound of an example's gradient; for mse at W = 0."""
        norm, k = self.input_norm, self.examples.targets
        match self.examples.loss:
            case "cross_entropy":  # softmax minus one-hot
                return math.sqrt(2.0) * norm
            case "bce":  # each of k residuals is in [−1, 1], and they are averaged
                return norm / math.sqrt(k)
            case "mse":
                return 2.0 / k * norm * self.examples.target_norm * _ROUNDED_UP

    @property
    def smoothness(self) -> float:
        """β: largest eigenvalue of the Hessian of an example's loss."""
        squared, k = self.input_norm**2, self.examples.targets
        match self.examples.loss:
            case "cross_entropy":  # diag(p) − p pᵀ has eigenvalues up to ½ (Böhning 1992)
                return squared / 2.0
            case "bce":
                return squared / (4.0 * k)
            case "mse":
                return 2.0 * squared / k

    def gradient_bound(self, radius: float) -> float:
        """Return G: bound of an example's gradient at weights of norm at most `radius`."""
        grows = self.smoothness * radius if self.examples.loss == "mse" else 0.0
        return self.start_gradient + grows


@dataclass(frozen=True)
class Descent:
    """Gradient descent as it runs: T steps on batches of a fixed order, from a public start.

    A step is W ← W − η (Σ_{i in batch} ∇ℓ_i(W) / b + λ W), projected into the ball of radius B. The
    n examples are cut once into m = ⌈n / b⌉ batches, in an order that does not depend on them. The
    steps take one batch after the other, and begin anew after the last. With b = n it is gradient
    descent on all examples.

    Guarantee: two data sets that differ in one example give results at an L2 distance of at most
    `sensitivity` + 2 `error` where the example's loss is removed (zero_out), and twice that where
    it is replaced (replace_one), from the same start.

    Proof (Wu et al. 2017, arXiv:1606.04722, section 3.2, after Hardt et al. 2016). Iterates lie in
    the ball of radius B = G₀ / λ around 0, as the start is projected into it. (Later projections
    remove rounding alone: ‖W⁺‖ ≤ (1 − η λ) ‖W‖ + η G₀ ≤ B, where for mse the part of the gradient
    that is linear in W only shrinks W.) So an example's gradient has norm at most G =
    `gradient_bound(B)` wherever it is taken. A projection moves no two points apart.

    The Hessian of a step's objective has its eigenvalues in [λ, β + λ], as at most b terms are
    divided by b. For η ≤ 2 / (β + 2 λ) a step therefore shrinks the distance of two points by the
    factor c = 1 − η λ (mean value theorem). Run the two data sets side by side. A step without the
    example shrinks their distance by c. A step with it shrinks it by c and adds at most η G / b
    under zero_out, and 2 η G / b under replace_one. The example is in at most ⌈T / m⌉ of the T
    steps, which lie m steps apart, and the distance is largest where the last of them is the last
    step: η G / b · Σ_{p < ⌈T / m⌉} c^{p m}. This holds for T steps, converged or not.

    In float64 a computed step differs from the exact one by at most δ = 8 K u (B + η (G + (β + λ)
    B)) with u = 2⁻⁵³ and K = b + 64 + the number of trained values: inner products and sums of at
    most K values in any order (Higham 2002, section 3.1), and exponentials with errors of at most
    64 u. Later steps shrink errors, so T steps err by at most T δ; the difference to the start and
    its division round by 8 u B. ∎

    Attributes:
        problem: the loss and its bounds.
        learning_rate: η.
        weight_decay: λ > 0.
        steps: T.
        batch: b.
        examples: n, a public number.

    Raises:
        ValueError: the problem is not strongly convex, or a step may move points apart.
    """

    problem: ConvexProblem
    learning_rate: float
    weight_decay: float
    steps: int
    batch: int
    examples: int

    def __post_init__(self) -> None:
        if not self.weight_decay > 0.0:
            raise ValueError(
                "without local.optimizer.weight_decay the problem is not strongly convex; set it "
                "above 0, such as weight_decay: 0.01"
            )
        if self.learning_rate > self.largest_rate:
            raise ValueError(
                f"local.optimizer.lr = {self.learning_rate:g} may move two models apart in a step, "
                f"and no sensitivity is proven: it may be at most 2 / (β + 2 λ) = "
                f"{_rounded_down(self.largest_rate)} for features of norm "
                f"{self.problem.examples.max_feature_norm:g} (privacy.max_feature_norm)"
            )

    @property
    def largest_rate(self) -> float:
        """2 / (β + 2 λ): with a smaller η a step moves no two points apart."""
        return 2.0 / (self.problem.smoothness + 2.0 * self.weight_decay)

    @property
    def radius(self) -> float:
        """B = G₀ / λ: all iterates lie in this ball."""
        return self.problem.start_gradient / self.weight_decay

    @property
    def num_batches(self) -> int:
        """m: batches of a pass."""
        return max(1, -(-self.examples // self.batch))

    @property
    def sensitivity(self) -> float:
        """Largest distance of two results, in exact arithmetic, under zero_out."""
        passes = -(-self.steps // self.num_batches)
        shrink = (1.0 - self.learning_rate * self.weight_decay) ** self.num_batches
        total = float(passes)
        if shrink < 1.0:
            total = min(total, (1.0 - shrink**passes) / (1.0 - shrink))
        bound = self.problem.gradient_bound(self.radius)
        return self.learning_rate * bound / self.batch * total * _ROUNDED_UP

    @property
    def error(self) -> float:
        """Largest distance of a computed result to the exact one."""
        problem, radius, rate = self.problem, self.radius, self.learning_rate
        terms = problem.size + self.batch + 64
        moved = problem.gradient_bound(radius) + (problem.smoothness + self.weight_decay) * radius
        step = 8.0 * terms * _UNIT_ROUNDOFF * (radius + rate * moved)
        return self.steps * step + 8.0 * _UNIT_ROUNDOFF * radius


def _rounded_down(value: float) -> str:
    """Return a number with four digits that is no larger."""
    exponent = 3 - math.floor(math.log10(value))
    return f"{math.floor(value * 10.0**exponent) / 10.0**exponent:.4g}"


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


def draft(request: PlanRequest) -> Draft:
    """Return the draft of a client that releases trained models.

    Args:
        request: its settings, its schedule, its model, and the convex problem that it solves.
    """
    parameters, problem, examples = request.parameters, request.problem, request.examples

    def known(noise: float) -> OutputMechanism:
        release = OutputMechanism(noise)
        if parameters is None or not isinstance(problem, ConvexProblem):
            return release
        check_draws(request.planned_rounds * parameters.size)
        local, optimizer = request.local, request.local.optimizer
        descent = Descent(
            problem,
            learning_rate=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            steps=whole_round_steps(request.privacy, local, examples),
            batch=local.lot(examples),
            examples=examples,
        )
        return release.for_training(descent, parameters.tensors[0].dtype)

    return draft_of_bounded(request, OutputMechanism, known)
