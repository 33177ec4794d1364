"""The strongly convex problem of output perturbation, and what one example moves its result by."""

import math
from dataclasses import dataclass

from fedsim.clients.mechanisms.bounded_examples import BoundedExamples

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
