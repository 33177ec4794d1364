"""Powers of probability distributions by FFT, with exponential tilting for very small delta.

Compositions are tilted if the rounding of a plain transform would exceed delta.

Let L be the composed privacy loss, K its log moment generating function and s > 0. The tilted
distribution is P_s[L = l] = e^(s l - K(s)) P[L = l]. It is the composition of the tilted losses of
the steps, and its mass lies near the losses that determine delta. Then

    delta(epsilon) = e^K(s) * sum over l > epsilon of (1 - e^(epsilon - l)) e^(-s l) P_s[L = l],

so a total error of x in the tilted masses changes delta by at most e^(K(s) - s epsilon) x. This is
small compared with delta if s is the best Rényi order minus 1. Such an s is near the saddle point
(Alghamdi et al. 2023, arXiv:2208.09595).

Every missing mass is added back as in `distribution`. This covers the tilted mass beyond the window
(e^-37 on each side, by Chernoff's bound) and the rounding of the transform. It also covers the
infinite losses, which tilting leaves out. A factor covers the rounding of the exponents.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fedsim.accountant.checks import Complexes, Floats
from fedsim.accountant.pld.mechanisms import Dominated, mechanism_pmfs
from fedsim.accountant.pld.privacy_profile import DeltaCurve, PrivacyProfile

_DROPPED = 60.0  # a term below e^-60 = 9e-27 is far below rounding


def fft_size(points: int) -> int:
    """Return the least size >= `points` for which a real FFT is fast."""
    from scipy import fft  # slow to import, and releases of all examples need none

    size: Any = fft.next_fast_len(points, real=True)  # its stub says None
    return size


def power(spectrum: Complexes, exponent: int) -> Complexes:
    """Return spectrum**exponent, the spectrum of a composition; terms below e^-60 are set to 0.

    Repeated squaring is faster and more exact than the complex power. A smooth distribution
    composed many times keeps few frequencies, so most terms need not be computed at all.

    Args:
        spectrum: spectrum of a probability distribution: no term is above 1 in modulus.
        exponent: number of copies that are composed, a whole number >= 1.
    """
    energy = np.square(spectrum.real) + np.square(spectrum.imag)
    kept = np.flatnonzero(energy > math.exp(-2.0 * _DROPPED / exponent))
    result = np.zeros_like(spectrum)
    result[kept] = _power(spectrum[kept], exponent)
    return result


def circular(spectrum: Complexes, size: int, total: int) -> tuple[Floats, float]:
    """Return the distribution (size,) with a given spectrum, and a bound on its rounding errors.

    The bound is on the sum of all absolute errors. With machine epsilon eps, an FFT has an error of
    a few eps in the 2-norm, and a power of a spectrum an error of eps times the exponent.

    Args:
        spectrum: product of results of `power`, as `rfft` lays it out.
        size: number of points of the grid.
        total: sum of the exponents of these results.
    """
    circle = np.fft.irfft(spectrum, size)
    energy = float(np.square(circle).sum())  # not a BLAS dot: its threads cost milliseconds here
    noise = 2.3e-16 * (4.0 * math.log2(size) + total) * math.sqrt(size * energy)
    return circle, noise


def _power(base: Complexes, exponent: int) -> Complexes:
    result = None
    while True:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if exponent == 0:
            return base if result is None else result
        base = base * base


_LOG_TAIL = 37.0  # e^-37 = 9e-17 of the tilted mass may lie outside the window, on each side
_EXPONENT_ROUNDING = 2.0**-42  # of a step's tilted masses, relative: exponents up to 750
_MAX_POINTS = 1 << 22


def tilted_profile(
    steps: Sequence[tuple[Dominated, int]], spacing: float, tilt: float, least_epsilon: float
) -> PrivacyProfile | None:
    """Return the privacy profile of a composition for epsilon >= `least_epsilon`.

    The profile is computed from exponentially tilted losses.

    The result is None if the grid would be too large, or the tilt would magnify rounding too much.

    Guarantee: for these epsilon, delta is never below that of the composition. Every tilt gives an
    upper bound. The bound is tight if tilt + 1 is the order of the best Rényi bound at the same
    delta.

    Args:
        steps: mechanisms and their counts >= 1.
        spacing: spacing of the grid of losses.
        tilt: the tilt s > 0.
        least_epsilon: least epsilon at which the profile is valid, > 0.
    """
    curves: list[DeltaCurve] = []
    for direction in (0, 1):
        curve = _tilted_curve(steps, spacing, direction, tilt, least_epsilon)
        if curve is None:
            return None
        curves.append(curve)
    return PrivacyProfile(tuple(curves))


def _tilted_curve(
    steps: Sequence[tuple[Dominated, int]],
    spacing: float,
    direction: int,
    tilt: float,
    least_epsilon: float,
) -> DeltaCurve | None:
    log_moment = sum(n * log_mgf(kind, spacing, direction, tilt) for kind, n in steps)
    log_scale = log_moment - tilt * least_epsilon
    low, high = (sign * _reach(steps, spacing, direction, tilt, sign) for sign in (-1, 1))
    first, last = math.floor(low / spacing), math.ceil(high / spacing)
    if log_scale > _LOG_TAIL or last - first >= _MAX_POINTS:
        return None
    size = fft_size(last - first + 1)
    spectrum, total, log_finite = np.ones(size // 2 + 1, dtype=np.complex128), 0, 0.0
    for kind, n in steps:
        pmf = mechanism_pmfs(kind, spacing)[direction]
        exponent = pmf.log_mass + tilt * spacing * pmf.places
        masses = np.exp(exponent - log_mgf(kind, spacing, direction, tilt))
        spectrum *= power(np.fft.rfft(np.bincount(pmf.places % size, masses, size)), n)
        total, log_finite = total + n, log_finite + n * math.log1p(-pmf.infinite)
    circle, noise = circular(spectrum, size, total)
    # By Cauchy and Schwarz, only the rounding weighted with e^(-s l) matters.
    noise *= math.sqrt(min(1.0, -1.0 / (size * math.expm1(-2.0 * tilt * spacing))))
    start = max(first, math.floor(least_epsilon / spacing) + 1)
    places = np.arange(start, max(first + size, start + 1))
    tilted = np.maximum(np.take(circle, places, mode="wrap"), 0.0)
    growth = math.exp(total * _EXPONENT_ROUNDING)
    masses = tilted * np.exp(log_moment - tilt * spacing * places) * growth
    missing = math.exp(log_scale) * growth * (noise + 2.0 * math.exp(-_LOG_TAIL))
    return DeltaCurve.of(start, spacing, masses, missing - math.expm1(log_finite))


def _reach(
    steps: Sequence[tuple[Dominated, int]],
    spacing: float,
    direction: int,
    tilt: float,
    sign: int,
) -> float:
    """Return x with P_s[sign L > x] <= e^-37, by the best Chernoff bound over 2^j."""
    centre = sum(n * log_mgf(kind, spacing, direction, tilt) for kind, n in steps)

    def bound(j: int) -> float:
        s = tilt + sign * 2.0**j
        total = sum(n * log_mgf(kind, spacing, direction, s) for kind, n in steps)
        return (total - centre + _LOG_TAIL) * 2.0**-j

    return min(map(bound, range(-12, 13)))


@lru_cache(maxsize=1 << 16)
def log_mgf(kind: Dominated, spacing: float, direction: int, s: float) -> float:
    """Return log E[exp(s L); L finite], where L is the privacy loss of one step on the grid.

    Args:
        kind: the mechanism.
        spacing: spacing of the grid of losses.
        direction: 0 for "remove", 1 for "add".
        s: the argument of the moment generating function, any number.
    """
    return mechanism_pmfs(kind, spacing)[direction].log_mgf(s * spacing)
