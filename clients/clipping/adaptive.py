"""Clipping to a private quantile of the gradient norms (Andrew et al. 2021)."""

import math
from dataclasses import dataclass, replace
from typing import Self

from fedsim.accountant.groups import adaptive_clip_noise_multiplier
from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.protocol.clip_bound import BoundRule, LearntBound, check_bound

# Andrew et al. 2021, section 3.1: σ_b = (expected lot) / 20 hardly costs anything.
LOT_OVER_COUNT_NOISE = 20.0


@dataclass(frozen=True)
class AdaptiveClipping(FlatClipping):
    """Scale each example's whole gradient to a bound C that follows a quantile of the norms.

    With each lot, Σ (b_i − ½) is released with noise σ_b, where b_i is 1 if the norm of example i
    was within C, else 0. With b̄ the noisy count over the public expected lot, plus ½, the next
    bound is C · exp(−η (b̄ − γ)) (Andrew et al. 2021, arXiv:1905.03871, Algorithm 1).

    Guarantee: an example moves the count by at most ½, so gradients at z_Δ and the count together
    are one Gaussian release with z = (z_Δ⁻² + (2 σ_b)⁻²)^(−1/2), whatever the lot. C changes
    between lots only, and is a function of the releases.

    Attributes:
        max_grad_norm: C, the bound of the next lot, and the only state: see `resume`.
        count_noise: σ_b.
        quantile: γ, the target fraction of examples within the bound.
        learning_rate: η of the geometric update.

    Raises:
        ValueError: an attribute is outside its range.
    """

    count_noise: float
    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        for name in ("max_grad_norm", "count_noise"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {value!r}")
        self._rule()

    @classmethod
    def for_lot(
        cls,
        expected_lot: float,
        *,
        max_grad_norm: float,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
    ) -> Self:
        """Return the clipping with σ_b = expected_lot / 20.

        Args:
            expected_lot: public expected number of examples in a lot.
            max_grad_norm: C of the first lot.
            quantile: γ in [0, 1].
            learning_rate: η > 0.
        """
        return cls(max_grad_norm, expected_lot / LOT_OVER_COUNT_NOISE, quantile, learning_rate)

    @property
    def adapted_clip_norm(self) -> float:
        """C of the next lot."""
        return self.max_grad_norm

    def resume(self, clip_norm: LearntBound) -> Self:
        """Return the clipping that continues from an adapted bound.

        Guarantee: a lot costs the same under every bound: gradients are clipped to it, their noise
        is z_Δ times it, and an example moves the count by at most ½.

        Raises:
            ValueError: `adapt` never returns such a bound.
        """
        return replace(self, max_grad_norm=check_bound(clip_norm))

    @property
    def count_noises(self) -> tuple[float, ...]:
        """σ_b of the count of examples within the bound."""
        return (self.count_noise,)

    def gradient_noise(self, noise_multiplier: float) -> float:
        """Return z_Δ, the noise multiplier of the gradients with which the whole step has z.

        Raises:
            ValueError: the count alone would spend the whole budget.
        """
        if noise_multiplier == 0.0:
            return 0.0
        if self.count_noise <= 0.5 * noise_multiplier:
            raise ValueError(
                f"adaptive clipping needs count noise > noise_multiplier / 2 = "
                f"{0.5 * noise_multiplier:.6g}, got {self.count_noise:.6g}: the count of clipped "
                "examples alone would spend the whole budget; use larger lots (the default count "
                "noise is expected lot / 20), more count noise, or flat clipping"
            )
        return adaptive_clip_noise_multiplier(noise_multiplier, self.count_noise)

    def adapt(self, *shares: float) -> Self:
        """Return the clipping of the next lot, given b̄, the released fraction within the bound."""
        (share,) = shares
        bound = self._rule().next_bound(self.max_grad_norm, share)
        return replace(self, max_grad_norm=bound)

    def _rule(self) -> BoundRule:
        return BoundRule(self.quantile, self.learning_rate)
