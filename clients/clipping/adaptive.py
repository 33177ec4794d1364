"""Adaptive clipping: norms that follow a quantile of the gradient norms, estimated with noise."""

import math
from dataclasses import dataclass, replace
from typing import Self

from fedsim.accountant.groups import (
    adaptive_clip_noise_multiplier,
    adaptive_clip_total_noise_multiplier,
)
from fedsim.clients.clipping.clipping import ALL_OTHERS, PatternClipping
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, BoundRule, check_bound

# Andrew et al. 2021, section 3.1: σ_b = (expected batch) / 20 hardly costs anything.
BATCH_OVER_COUNT_NOISE = 20.0


@dataclass(frozen=True)
class AdaptiveClipping(PatternClipping):
    """Clipping to norms that follow a quantile of gradient norms, for one or several groups.

    With each batch, a count of unclipped gradients, Σ_i (b_i − ½), is released for each group, with
    Gaussian noise of standard deviation σ_b. Here b_i is 1 if gradient i has norm at most the
    clipping norm C, else 0. The noisy share b̄ is the noisy count divided by the public expected
    batch size, plus ½. The next clipping norm is C · exp(−η (b̄ − γ)), with learning rate η and
    target share γ (Andrew et al. 2021, arXiv:1905.03871, Algorithm 1; for groups McMahan et al.
    2018, section 3). The pattern `*` alone adapts one clipping norm of the whole gradient.

    Guarantee: an example changes each count by at most ½. So gradients with noise multiplier z_Δ
    and all M counts are one Gaussian release with z = (z_Δ⁻² + M (2 σ_b)⁻²)^(−1/2), whatever the
    batch. Clipping norms change between batches only, and are a function of the releases. A batch
    costs the same under every clipping norm: gradients are clipped to it, and their noise is
    proportional to it.

    Attributes:
        bounds: clipping norm of each group for the next batch. No other attribute changes.
        count_noise: σ_b, standard deviation of the noise on the count of each group.
        quantile: γ, target share of unclipped gradients in each group.
        learning_rate: η of the geometric update.

    Raises:
        ValueError: an attribute is outside its range.
    """

    count_noise: float
    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("max_grad_norm", max(self.bounds)), ("count_noise", self.count_noise)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {value!r}")
        self._rule()

    @classmethod
    def flat(
        cls,
        max_grad_norm: float,
        count_noise: float,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
    ) -> Self:
        """Return adaptive clipping with one clipping norm, of the whole gradient.

        Args:
            max_grad_norm: clipping norm of the first batch.
            count_noise: standard deviation of the noise on the count.
            quantile: target share of unclipped gradients, in [0, 1].
            learning_rate: learning rate > 0 of the geometric update of the clipping norm.
        """
        return cls((ALL_OTHERS,), (max_grad_norm,), count_noise, quantile, learning_rate)

    @classmethod
    def for_batch(
        cls,
        expected_batch: float,
        *,
        max_grad_norm: float,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
    ) -> Self:
        """Return adaptive clipping with one clipping norm and count noise `expected_batch` / 20.

        Args:
            expected_batch: public expected batch size.
            max_grad_norm: clipping norm of the first batch.
            quantile: target share of unclipped gradients, in [0, 1].
            learning_rate: learning rate > 0 of the geometric update of the clipping norm.
        """
        noise = expected_batch / BATCH_OVER_COUNT_NOISE
        return cls.flat(max_grad_norm, noise, quantile, learning_rate)

    @property
    def adapted_clip_norm(self) -> AdaptiveClipNorm:
        """Clipping norm of the next batch; with groups, a tuple with one norm for each group."""
        return self.bounds[0] if self.patterns == (ALL_OTHERS,) else self.bounds

    def resume(self, clip_norm: AdaptiveClipNorm) -> Self:
        """Return the clipping rule that continues from the given adaptive clipping norm.

        Args:
            clip_norm: the clipping norm; with groups, a tuple with one norm for each group.

        Raises:
            ValueError: `clip_norm` does not have exactly one valid norm for each group.
        """
        norms = clip_norm if isinstance(clip_norm, tuple) else (clip_norm,)
        if len(norms) != len(self.patterns):
            raise ValueError(
                f"there must be one adapted clip norm for each of {len(self.patterns)} groups, got "
                f"{clip_norm}"
            )
        return replace(self, bounds=tuple(map(check_bound, norms)))

    @property
    def count_noises(self) -> tuple[float, ...]:
        """Standard deviation of the noise on the count of unclipped gradients in each group."""
        return (self.count_noise,) * len(self.patterns)

    def gradient_noise(self, noise_multiplier: float) -> float:
        """Return the gradients' noise multiplier, given the noise multiplier of the whole step.

        Args:
            noise_multiplier: noise multiplier of gradients and noisy counts together.

        Raises:
            ValueError: the noisy counts alone would cost more privacy than the whole step may.
        """
        if noise_multiplier == 0.0:
            return 0.0
        try:
            return adaptive_clip_noise_multiplier(
                noise_multiplier, self.count_noise, len(self.patterns)
            )
        except ValueError as error:
            raise ValueError(
                f"{error}; use larger batches (the default count noise is expected batch size / "
                "20), more clipping.count_noise, fewer groups, or clipping: flat"
            ) from error

    def whole_noise(self, gradient_noise: float) -> float:
        """Return the noise multiplier of the whole step, given the gradients' noise multiplier."""
        return adaptive_clip_total_noise_multiplier(
            gradient_noise, self.count_noise, len(self.patterns)
        )

    def adapt(self, *shares: float) -> Self:
        """Return the clipping rule for the next batch.

        Args:
            shares: the noisy share of unclipped gradients of each group in the current batch.
        """
        rule = self._rule()
        moved = (rule.next_bound(*pair) for pair in zip(self.bounds, shares, strict=True))
        return replace(self, bounds=tuple(moved))

    def _rule(self) -> BoundRule:
        return BoundRule(self.quantile, self.learning_rate)
