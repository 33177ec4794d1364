"""Powers of probability distributions by FFT, and what rounding may have done to them."""

import math
from typing import Any

import numpy as np

from fedsim.accountant.arrays import Complexes, Floats

_DROPPED = 60.0  # a term below e^-60 = 9e-27 is nothing beside rounding


def fft_size(points: int) -> int:
    """Return the least size >= points for which a real FFT is fast."""
    from scipy import fft  # slow to import, and releases of all examples need none

    size: Any = fft.next_fast_len(points, real=True)  # its stub says None
    return size


def power(spectrum: Complexes, exponent: int) -> Complexes:
    """Return spectrum**exponent; terms below e^-60 become 0.

    By squaring, which is faster and more exact than the complex power. Of a smooth distribution
    composed many times hardly a frequency is left, so most terms need not be computed at all.

    Args:
        spectrum: of a probability distribution: no term is above 1 in modulus.
        exponent: >= 1.
    """
    energy = np.square(spectrum.real) + np.square(spectrum.imag)
    kept = np.flatnonzero(energy > math.exp(-2.0 * _DROPPED / exponent))
    result = np.zeros_like(spectrum)
    result[kept] = _power(spectrum[kept], exponent)
    return result


def circular(spectrum: Complexes, size: int, total: int) -> tuple[Floats, float]:
    """Return the distribution with that spectrum and a bound on its summed rounding errors.

    An FFT errs by a few eps in the 2-norm, and a power of a spectrum by eps times the exponent.

    Args:
        spectrum: product of powers of spectra, as from `power`.
        size: number of points of the circle.
        total: sum of the exponents.
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
