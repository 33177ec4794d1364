"""Output perturbation: a model is trained without noise, and released with Gaussian noise.

The training problem is strongly convex, so one example changes the trained model by a bounded
amount: the sensitivity. The release happens once a round.

| case                          | release                                | event                |
|-------------------------------|----------------------------------------|----------------------|
| an example is NaN or infinite | that example contributes exactly 0     | charged as usual     |
| noise multiplier 0            | the trained model, not rounded         | Gaussian(0): ε is ∞  |
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedsim.accountant import Event, Gaussian
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import OptimizerSettings
from fedsim.clients.mechanisms.bounded_examples import BoundedExamples, bounded_rows
from fedsim.clients.mechanisms.contract import ModelRelease
from fedsim.clients.mechanisms.dp_sgd.draft import whole_round_steps
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, check_draws, draft_of_bounded
from fedsim.clients.sampling.sampling import Charges
from fedsim.noise.release import NoiseRangeError, check_deviations, normal_tail, release_
from fedsim.noise.sources import DEVIATION, SATURATION, NoiseSource, effective_multiplier

_ROUNDED_UP = 1.0 + 2.0**-30  # more than a norm may exceed its bound after clipping in float64
_UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True)
class ConvexProblem:
    """Linear model with a convex loss on examples of bounded norm.

    Features x have L2 norm at most R. The input x̃ is x, followed by a 1 if the model has a bias;
    its norm is at most R̃. The weights W are one matrix, and the k outputs are W x̃.

    Attributes:
        examples: sizes and bounds of an example, and the loss.
        bias: whether the model has a bias.
    """

    examples: BoundedExamples
    bias: bool

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return self.examples.targets * (self.examples.features + self.bias)

    @property
    def input_norm(self) -> float:
        """Bound R̃ on the L2 norm of the input x̃ (the features, followed by a 1 for a bias)."""
        return math.hypot(self.examples.max_feature_norm * _ROUNDED_UP, float(self.bias))

    @property
    def start_gradient(self) -> float:
        """Bound G₀ on the L2 norm of a per-example gradient; for mse, at weights 0 only."""
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
        """Bound β on the largest eigenvalue of the Hessian of an example's loss."""
        squared, k = self.input_norm**2, self.examples.targets
        match self.examples.loss:
            case "cross_entropy":  # diag(p) − p pᵀ has eigenvalues up to ½ (Böhning 1992)
                return squared / 2.0
            case "bce":
                return squared / (4.0 * k)
            case "mse":
                return 2.0 * squared / k

    def gradient_bound(self, radius: float) -> float:
        """Return a bound on per-example gradient norms at weights of L2 norm at most `radius`."""
        grows = self.smoothness * radius if self.examples.loss == "mse" else 0.0
        return self.start_gradient + grows


@dataclass(frozen=True)
class Descent:
    """Projected gradient descent for T steps, on batches in a fixed order, from a public model.

    A step is W ← W − η (Σ_{i in batch} ∇ℓ_i(W) / b + λ W), projected into the ball of radius B.
    Here W are the weights, ℓ_i the loss of example i, η the learning rate, λ the weight decay and b
    the batch size. The n examples are split once into m = ⌈n / b⌉ batches, in an order independent
    of their values. The steps go through the batches in turn, and start again after the last. With
    b = n it is gradient descent on all examples.

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
        learning_rate: learning rate η.
        weight_decay: weight decay λ > 0.
        steps: number T of steps.
        batch: batch size b.
        examples: the client's public number n of examples.

    Raises:
        ValueError: the problem is not strongly convex, or the learning rate is so large that a
            step may increase the distance of two models.
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
                f"local.optimizer.lr = {self.learning_rate:g} is so large that a step may increase "
                f"the distance of two models, and no sensitivity is proven: it may be at most "
                f"2 / (β + 2 λ) = {_rounded_down(self.largest_rate)} for features of norm "
                f"{self.problem.examples.max_feature_norm:g} (privacy.max_feature_norm)"
            )

    @property
    def largest_rate(self) -> float:
        """Largest learning rate at which no step increases the distance of two models."""
        return 2.0 / (self.problem.smoothness + 2.0 * self.weight_decay)

    @property
    def radius(self) -> float:
        """Radius B of the ball around 0 in which the weights are during the whole training."""
        return self.problem.start_gradient / self.weight_decay

    @property
    def num_batches(self) -> int:
        """Number of batches in one pass over the examples."""
        return max(1, -(-self.examples // self.batch))

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity Δ of the trained weights under zero_out adjacency, in exact arithmetic."""
        passes = -(-self.steps // self.num_batches)
        shrink = (1.0 - self.learning_rate * self.weight_decay) ** self.num_batches
        total = float(passes)
        if shrink < 1.0:
            total = min(total, (1.0 - shrink**passes) / (1.0 - shrink))
        bound = self.problem.gradient_bound(self.radius)
        return self.learning_rate * bound / self.batch * total * _ROUNDED_UP

    @property
    def error(self) -> float:
        """Bound E on the L2 distance between weights trained in float64 and in exact arithmetic."""
        problem, radius, rate = self.problem, self.radius, self.learning_rate
        terms = problem.size + self.batch + 64
        moved = problem.gradient_bound(radius) + (problem.smoothness + self.weight_decay) * radius
        step = 8.0 * terms * _UNIT_ROUNDOFF * (radius + rate * moved)
        return self.steps * step + 8.0 * _UNIT_ROUNDOFF * radius


def _rounded_down(value: float) -> str:
    """Return a value rounded down to four significant digits, as text."""
    exponent = 3 - math.floor(math.log10(value))
    return f"{math.floor(value * 10.0**exponent) / 10.0**exponent:.4g}"


@dataclass(frozen=True)
class OutputMechanism(ModelRelease):
    """Mechanism that releases weights trained by `Descent` with Gaussian noise, once a round.

    The noise has standard deviation z Δ, with noise multiplier z and sensitivity Δ of the trained
    weights θ. Weights and noise are rounded to an integer grid.

    Guarantee: a release has the privacy event `mechanism` under zero_out and replace_one. This
    holds for every model that training may start from, even if it follows from earlier releases:
    the start is public, and neither Δ nor the noise depends on it.

    Proof. The release adds noise of deviation 2²⁴ to rint(x), x = (θ − start) 2²⁴ / (z Δ). Under
    zero_out two results differ by at most Δ + 2 E (`Descent`, with its rounding E), so the rounded
    vectors of d values differ by at most 2²⁴ (1 + 2 E / Δ) / z + √d. `effective_multiplier` divides
    by 1 + 2 e + z √d 2⁻²⁴ with e = E / Δ, which is the same. Replace-one allows twice that, as its
    Gaussian does. ∎

    Attributes:
        noise_multiplier: noise multiplier z.
        descent: the training, which determines Δ; None as long as the training is unknown, and then
            `mechanism` ignores the effect of the grid.
    """

    noise_multiplier: float
    descent: Descent | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be finite, got {self.noise_multiplier!r}")

    @property
    def mechanism(self) -> Event:
        """Privacy event of one round's release."""
        return Gaussian(self.effective_noise_multiplier)

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier of one release, reduced by the effect of rounding to an integer grid."""
        if self.descent is None:
            return self.noise_multiplier
        relative = self.descent.error / self.descent.sensitivity
        return effective_multiplier(self.noise_multiplier, self.descent.problem.size, relative)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on each weight: noise multiplier times sensitivity.

        Raises:
            ValueError: `descent` is None, so that the sensitivity is unknown.
        """
        if self.descent is None:
            raise ValueError("the sensitivity needs the training: call for_training first")
        return self.noise_multiplier * self.descent.sensitivity

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return the privacy events of a client's releases, as (event, count) pairs.

        Args:
            first_step: number of earlier releases; it does not change the result.
            steps: number of further releases, one a round.
            noise_factor: standard deviation of the noise that an adversary faces, divided by that
                of the release; 1 in local trust.
        """
        noise = noise_factor * self.effective_noise_multiplier
        return [(Gaussian(noise), steps)] if steps else []

    def release_variance(
        self, parameters: FlatParameters, lr: float | None, round_steps: int
    ) -> float | None:
        """Return the expected squared L2 norm of a round's noise, or None if it is unknown."""
        return None if self.descent is None else parameters.size * self.deviation**2

    def largest_update(
        self, optimizer: OptimizerSettings, round_steps: int, *, chance: float
    ) -> float | None:
        """Return a bound on each value of a client's update, or None if the training is unknown.

        The start may lie outside the ball of all trained weights, as it is a mean of noisy models.
        Training projects it into the ball, and the released model gets noise again.
        """
        if self.descent is None:
            return None
        return 3.0 * self.descent.radius + 2.0 * normal_tail(chance) * self.deviation

    def for_training(self, descent: Descent, dtype: torch.dtype) -> Self:
        """Return the mechanism with noise that fits the sensitivity of a client's training.

        Args:
            descent: the training.
            dtype: dtype of the model.

        Raises:
            NoiseRangeError: the dtype cannot hold the noise, or the noise is too small for the
                range of the grid.
        """
        mechanism = replace(self, descent=descent)
        if self.noise_multiplier:
            check_deviations((mechanism.deviation,), dtype, "noise_multiplier · sensitivity")
            if mechanism.deviation * SATURATION / DEVIATION < 2.0 * descent.radius:
                raise NoiseRangeError(
                    f"noise_multiplier {self.noise_multiplier:.3g} is too small for the grid; set "
                    "a larger one, or 0 for no privacy"
                )
        return mechanism

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
        """Train a client's model and return it with noise, float64 (size,).

        Guarantee: with noise, the result is a function of two things: the start, projected into the
        ball of radius `descent.radius`, and integers. These are the rounded difference between the
        trained model and the projected start, plus the integers that the noise source draws.

        Args:
            start: parameters of the global model (size,), weights before biases.
            features: the client's features (n, ...).
            targets: the client's targets (n, ...).
            noise: the client's noise source.
            order: a permutation of 0 ... n − 1 that is cut into batches (n,); it must not depend on
                the examples.
            steps: number of training steps, or 0 to test the noise alone.

        Raises:
            ValueError: `descent` is None, so that the sensitivity is unknown.
        """
        descent = self.descent
        if descent is None:
            raise ValueError("a release needs the sensitivity: call for_training first")
        begin = _project(start.double(), descent.radius)
        trained = train(begin, features, targets, descent, order=order, steps=steps)
        row = (trained - begin).unsqueeze(0)
        z = self.noise_multiplier
        length = self.deviation / DEVIATION if z else 1.0
        row = row / length
        release_(row, [noise if z else None], None, row)
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
    """Return the parameters after training by `Descent`, without noise, float64 (size,).

    Args:
        start: initial parameters, float64 (size,), with an L2 norm of at most `descent.radius`.
        features: the client's features (n, ...).
        targets: the client's targets (n, ...).
        descent: the loss, the learning rate, the weight decay and the batch size.
        order: a permutation of 0 ... n − 1 that is cut into batches (n,).
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
    """Return the gradient of each example's loss with respect to its outputs (b, k)."""
    match problem.examples.loss:
        case "cross_entropy":
            return torch.softmax(outputs, dim=1) - targets
        case "bce":
            return (torch.sigmoid(outputs) - targets) / problem.examples.targets
        case "mse":
            return (outputs - targets) * (2.0 / problem.examples.targets)


def _matrix(flat: Tensor, problem: ConvexProblem) -> Tensor:
    """Return flat parameters as a matrix of weights, the biases in its last column if any."""
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
    """Return the privacy plan, before noise calibration, of a client that releases trained models.

    Args:
        request: the client's settings, schedule and model, and the convex problem that it solves.
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
            batch=local.expected_batch(examples),
            examples=examples,
        )
        return release.for_training(descent, parameters.tensors[0].dtype)

    return draft_of_bounded(request, OutputMechanism, known)
