"""The grid of a release, and the noise multiplier that it leaves of the nominal one.

One standard deviation of the noise has 2²⁴ steps of the grid. Theorem and proof:
docs/explain/proofs.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

GRID_BITS = 24
DEVIATION = 2.0**GRID_BITS
"""Standard deviation of the noise, in steps of the grid."""

MAX_DRAW = 1 << 30
"""No draw of a noise source is larger: 64 standard deviations."""

SATURATION = 2.0**51
"""Largest sum, in steps: with noise below 2³⁰ it stays an integer that float64 holds exactly."""

_ROUNDED_DOWN = 1.0 - 2.0**-48  # more than the few operations of a formula may round up


@dataclass(frozen=True)
class SumRounding:
    """By how much a sum of clipped gradients may be wrong; lots of few rows are summed in float32.

    Guarantee: a computed sum of the contributions of at most n examples, each of norm at most C, is
    within `error` · C of the exact one, in any order of addition, where lots of at most `rows`
    examples are added up in float32 and all others in float64.

    - float32: a contribution is multiplied out, added up with at most `SUM_HEIGHT` = h rows at
      once, and then with at most R / h such runs: R γ(h + R / h + 2), with γ(m) = m u / (1 − m u)
      and u = 2⁻²⁴ (Higham 2002, section 3.1). What underflows is less than 2⁻¹⁰⁰ steps.
    - float64: a contribution passes through at most n additions within tiles, and one for each
      tile: n (2 n + 16) 2⁻⁵³ (section 4.2).

    Attributes:
        rows: R, the most examples of a lot that is added up in float32; 0: none is.
        error: e, in clipping bounds.
    """

    rows: int
    error: float

    @classmethod
    def of(cls, examples: int, rows: int) -> Self:
        """Return the rounding of sums over lots of at most `examples`, in tiles of `rows`.

        Float32 costs noise, twice its error; where that would be more than 2⁻⁸, it is not used.

        Args:
            examples: n, the public number of examples that a lot may have at most.
            rows: R, the public number of rows of a client in a tile.
        """
        rows, double = min(examples, rows), examples * (2.0 * examples + 16.0) * 2.0**-53
        operations = min(rows, SUM_HEIGHT) + math.ceil(rows / SUM_HEIGHT) + 2
        single = rows * operations * 2.0**-24 / (1.0 - operations * 2.0**-24)
        if single > _MOST_ERROR:
            return cls(0, double)
        return cls(rows, max(single, double) / _ROUNDED_DOWN)


SUM_HEIGHT = 48
"""Rows of a client that are added up in float32 at once."""

_MOST_ERROR = 2.0**-9


def effective_multiplier(
    noise_multiplier: float,
    dimensions: int,
    error: float,
    *,
    column_norm: float = 1.0,
    bands: int = 1,
) -> float:
    """Return z' ≤ z, the noise multiplier that a release on the grid is charged with.

    Guarantee: an example moves the integers f = rint(S) of a sum S by at most 2²⁴ / z' in L2 norm,
    so f with rounded normals of deviation 2²⁴ is a function of a Gaussian release with z': z' = z /
    (1 + 2 e + z √d 2⁻²⁴), rounded down.

    Correlated noise moves the releases of an example's lot and of the b − 1 steps after it, by at
    most 2²⁴ / z' together, with z' = z / (‖c‖ (1 + 2 e + z √d 2⁻²⁴) + z √((b − 1) d) 2⁻²⁴): each of
    the later steps rounds once more (docs/howto/correlated_noise.md).

    Args:
        noise_multiplier: z ≥ 0 of one group of values.
        dimensions: d, the number of values in the group.
        error: e of their sum, see `SumRounding`.
        column_norm: ‖c‖ of correlated noise (`NoiseCorrelation`); 1 without correlation.
        bands: b, the number of its coefficients.
    """
    if noise_multiplier == 0.0:
        return 0.0
    steps = noise_multiplier * math.sqrt(dimensions) / DEVIATION
    moved = column_norm * (1.0 + 2.0 * error + steps) + math.sqrt(bands - 1) * steps
    return noise_multiplier / moved * _ROUNDED_DOWN


def nominal_multiplier(wanted: float, nominal: float, effective: Callable[[float], float]) -> float:
    """Return `nominal` or a little more: a noise multiplier with an effective one that suffices.

    Args:
        wanted: the least effective noise multiplier.
        nominal: where the search starts.
        effective: the effective noise multiplier of a nominal one.

    Raises:
        ValueError: there are so many values that the grid alone costs more.
    """
    for _ in range(_MOST_TRIALS):
        found = effective(nominal)
        if found >= wanted:
            return nominal
        nominal *= max(wanted / found, 1.0 + 2.0**-50)
    raise ValueError(
        f"noise_multiplier {wanted:.6g} is out of reach for this model: rounding its values to the "
        "grid costs more; use a smaller model, or a larger target_epsilon"
    )


_MOST_TRIALS = 100
