"""Rounding of sums to an integer grid before noise is added, and its effect on the accounting.

One step of the grid is 2⁻²⁴ standard deviations of the noise. Accounting uses a noise multiplier
that is reduced for the rounding. Theorem and proof: docs/explain/proofs.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

GRID_BITS = 24
DEVIATION = 2.0**GRID_BITS
"""Standard deviation of the noise, in steps of the grid."""

MAX_DRAW = 1 << 30
"""Bound on the size of every draw of a noise source: 64 standard deviations."""

SATURATION = 2.0**51
"""Largest sum, in steps of the grid: with noise below 2³⁰, float64 holds it exactly."""

_ROUNDED_DOWN = 1.0 - 2.0**-48  # a factor that outweighs the rounding of a formula's operations


@dataclass(frozen=True)
class SumRounding:
    """Bound on the rounding error of a sum of clipped gradients, in float32 or float64.

    Guarantee: a computed sum of the contributions of at most n examples, each of norm at most C, is
    within `error` · C of the exact sum, in any order of addition. Batches of at most `rows`
    examples are added in float32 and all larger ones in float64.

    - float32: with R = `rows`, contributions are added in runs of at most `SUM_HEIGHT` = h
      examples, and then the at most R / h runs are added. The error is R γ(h + R / h + 2), with
      γ(m) = m u / (1 − m u) and u = 2⁻²⁴ (Higham 2002, section 3.1). Underflow costs less than
      2⁻¹⁰⁰ grid steps (a step is 2⁻²⁴ standard deviations of the noise).
    - float64: a contribution passes through at most n additions within padded batches, and one more
      for each padded batch. The error is n (2 n + 16) 2⁻⁵³ (Higham 2002, section 4.2).

    Attributes:
        rows: largest number R of examples in a batch that is added in float32. The value 0 means
            that float32 is not used.
        error: largest error e of a sum, in units of the clip norm C.
    """

    rows: int
    error: float

    @classmethod
    def of(cls, examples: int, rows: int) -> Self:
        """Return the bound on the rounding error of sums over a client's batches.

        The rounding of float32 sums lowers the effective noise multiplier by the fraction 2 ·
        error. If this fraction is above 2⁻⁸, the sums are in float64 instead.

        Args:
            examples: public limit n on the number of examples in a batch.
            rows: public number R of a client's examples in a padded batch.
        """
        rows, double = min(examples, rows), examples * (2.0 * examples + 16.0) * 2.0**-53
        operations = min(rows, SUM_HEIGHT) + math.ceil(rows / SUM_HEIGHT) + 2
        single = rows * operations * 2.0**-24 / (1.0 - operations * 2.0**-24)
        if single > _MOST_ERROR:
            return cls(0, double)
        return cls(rows, max(single, double) / _ROUNDED_DOWN)


SUM_HEIGHT = 48
"""Largest number of contributions of examples that are added in one run in float32."""

_MOST_ERROR = 2.0**-9


def effective_multiplier(
    noise_multiplier: float,
    dimensions: int,
    error: float,
    *,
    column_norm: float = 1.0,
    bands: int = 1,
) -> float:
    """Return the effective noise multiplier z' ≤ z, which covers rounding to the integer grid.

    Guarantee: an example moves the integers f = rint(S) of a sum S by at most 2²⁴ / z' in L2 norm.
    So f plus rounded normals of standard deviation 2²⁴ is a function of a Gaussian release with
    noise multiplier z' = z / (1 + 2 e + z √d 2⁻²⁴), rounded down.

    With correlated noise, an example of one step also moves the releases of the b − 1 following
    steps; together they move by at most 2²⁴ / z' in L2 norm. Each of the later steps rounds once
    more, so z' = z / (‖c‖ (1 + 2 e + z √d 2⁻²⁴) + z √((b − 1) d) 2⁻²⁴)
    (docs/howto/correlated_noise.md).

    Args:
        noise_multiplier: nominal noise multiplier z ≥ 0 of a group of values.
        dimensions: number of values d in the group.
        error: rounding error e of the group's sum, in clip norms (see `SumRounding`).
        column_norm: column norm ‖c‖ of correlated noise (`NoiseCorrelation`); 1 for independent
            noise.
        bands: number of bands b of correlated noise; 1 for independent noise.
    """
    if noise_multiplier == 0.0:
        return 0.0
    steps = noise_multiplier * math.sqrt(dimensions) / DEVIATION
    moved = column_norm * (1.0 + 2.0 * error + steps) + math.sqrt(bands - 1) * steps
    return noise_multiplier / moved * _ROUNDED_DOWN


def nominal_multiplier(wanted: float, nominal: float, effective: Callable[[float], float]) -> float:
    """Return a nominal noise multiplier whose effective noise multiplier is at least `wanted`.

    Args:
        wanted: smallest effective noise multiplier to reach.
        nominal: noise multiplier to start from, which is returned if it suffices.
        effective: function from a nominal to its effective noise multiplier.

    Raises:
        ValueError: no nominal multiplier suffices: rounding the model's values costs too much.
    """
    for _ in range(_MOST_TRIALS):
        reached = effective(nominal)
        if reached >= wanted:
            return nominal
        nominal *= max(wanted / reached, 1.0 + 2.0**-50)
    raise ValueError(
        f"noise_multiplier {wanted:.6g} is out of reach for this model: rounding its values to the "
        "grid costs more; use a smaller model, or a larger target_epsilon"
    )


_MOST_TRIALS = 100
