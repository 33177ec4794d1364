"""Privacy loss distributions: the exact composition of (Poisson-sampled) Gaussians, by FFT.

Each step's privacy loss is put on a grid so that the discrete loss dominates the true one
(`loss_pmf`); the loss of the composition is the convolution of the discrete ones (Koskela, Jälkö,
Honkela 2020, arXiv:1906.03049). Then delta(epsilon) = E[(1 - e^(epsilon - L))_+].

Everything that could lower delta is added back: the mass beyond the window and beyond each step's
grid, and the rounding noise of the FFT. So the answers are upper bounds. They exceed the exact
ones by about T h^2 (s + 1) / 12 in epsilon (h the grid's spacing, s + 1 the best Rényi order),
since rounding adds variance h^2/6 to each loss; `_spacing` chooses h to keep that near 1e-4.

Limits: where delta is below what the FFT resolves (about 1e-13 for hundreds of steps), or the grid
would have to be coarser than 1/8, the answer is the one of Rényi DP, which is also an upper bound.
"""

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from fedsim.accountant.composition import SampledGaussian, joint_noise_multiplier
from fedsim.accountant.conversion import delta_from_rdp, epsilon_from_rdp
from fedsim.accountant.gaussian import gaussian_epsilon, gaussian_log_delta
from fedsim.accountant.loss_pmf import MAX_CELLS, LossPmf, loss_range, loss_variance, step_pmfs
from fedsim.accountant.privacy_profile import DeltaCurve, PrivacyProfile
from fedsim.accountant.rdp import DEFAULT_ORDERS, rdp_sampled_gaussian

Floats = NDArray[np.float64]
Steps = tuple[tuple[SampledGaussian, int], ...]

_TARGET_EXCESS = 1e-4
_MAX_POINTS = 1 << 21
_COARSEST = 0.125
_LOG_TAIL = 37.0  # e^-37 = 9e-17 of the composed mass may lie outside the window, on each side
# Caches are kept small where entries are arrays: a spectrum may have 16 MB, a profile 100 MB.
# Beyond these, less noise or more sampling is assumed: a bound, and the grid keeps its digits.
_MOST_NOISE, _LEAST_RATE = 1e9, 1e-100


def pld_epsilon(steps: Mapping[SampledGaussian, int], delta: float) -> float:
    """Returns epsilon at `delta` of all steps together.

    Guarantee: the composition is (epsilon, delta)-DP under zero-out and add-remove adjacency.

    Args:
        steps: how often each mechanism runs; not empty, counts >= 1.
        delta: in (0, 1).
    """
    return _epsilon(_normalised(steps), delta)


def pld_delta(steps: Mapping[SampledGaussian, int], epsilon: float) -> float:
    """Returns delta at `epsilon` of all steps together; guarantee and steps as `pld_epsilon`.

    Args:
        steps: how often each mechanism runs; not empty, counts >= 1.
        epsilon: finite, >= 0.
    """
    return _delta(_normalised(steps), epsilon)


def _normalised(steps: Mapping[SampledGaussian, int]) -> Steps:
    """Returns the steps sorted, with all plain Gaussians joined into the one they equal."""
    plain: Counter[float] = Counter()
    rest: Counter[SampledGaussian] = Counter()
    for (rate, noise), count in steps.items():
        noise = min(noise, _MOST_NOISE)
        if rate == 1.0:
            plain[noise] += count
        else:
            rest[SampledGaussian(max(rate, _LEAST_RATE), noise)] += count
    if plain:
        rest[SampledGaussian(1.0, joint_noise_multiplier(plain))] = 1
    return tuple(sorted(rest.items()))


@lru_cache(maxsize=1 << 16)
def _epsilon(steps: Steps, delta: float) -> float:
    mu = _plain_mu(steps)
    if mu is not None:
        return gaussian_epsilon(mu, delta)
    profile = _composed(steps)
    if profile is None or delta < profile.resolved:
        by_rdp = epsilon_from_rdp(DEFAULT_ORDERS, _rdp(steps), delta)[0]
        return min(by_rdp, profile.epsilon(delta)) if profile else by_rdp
    return profile.epsilon(delta)


@lru_cache(maxsize=1 << 16)
def _delta(steps: Steps, epsilon: float) -> float:
    mu = _plain_mu(steps)
    if mu is not None:
        return math.exp(gaussian_log_delta(mu, epsilon))
    profile = _composed(steps)
    delta = profile.delta(epsilon) if profile else 1.0
    if profile is None or delta < profile.resolved:
        delta = min(delta, delta_from_rdp(DEFAULT_ORDERS, _rdp(steps), epsilon)[0])
    return delta


def _plain_mu(steps: Steps) -> float | None:
    """Returns 1/z if the steps are one Gaussian without sampling, which has a closed form."""
    (rate, noise), _ = steps[0]
    return 1.0 / noise if len(steps) == 1 and rate == 1.0 else None


def _rdp(steps: Steps) -> Floats:
    return np.sum([n * rdp_sampled_gaussian(*kind, DEFAULT_ORDERS) for kind, n in steps], axis=0)


@lru_cache(maxsize=2)
def _composed(steps: Steps) -> PrivacyProfile | None:
    """Returns the composition, or None where no grid of at most `_MAX_POINTS` points will do."""
    spacing = _spacing(steps)
    while spacing <= _COARSEST:
        if _cells(steps, spacing) <= MAX_CELLS:
            windows = [_window(steps, spacing, direction) for direction in (0, 1)]
            if max(high - low for low, high in windows) < _MAX_POINTS:
                remove, add = (_compose(steps, spacing, d, *windows[d]) for d in (0, 1))
                return PrivacyProfile((remove, add))
        spacing *= 2.0
    return None


def _spacing(steps: Steps) -> float:
    """Returns the grid's spacing, a power of two: different T and z then share their pmfs.

    The saddle point s of the composed loss is about 6 / sqrt(variance) for the delta that people
    ask for, but the tail of a single step limits it to about z^2 log(1/q).
    """
    total = sum(n for _, n in steps)
    deviation = math.sqrt(sum(n * loss_variance(*kind) for kind, n in steps))
    single = max(2.0 * z * z * -math.log(q) + 6.0 * z + 2.0 for (q, z), _ in steps)
    saddle = min(6.0 / deviation if deviation > 0.0 else math.inf, single)
    excess = _TARGET_EXCESS * min(1.0, 10.0 * deviation + 1e-9)
    spacing = math.sqrt(12.0 * excess / (total * (1.0 + saddle)))
    return 2.0 ** min(-6, math.floor(math.log2(spacing)))


def _cells(steps: Steps, spacing: float) -> float:
    ranges = [loss_range(*kind) for kind, _ in steps]
    return max(high - low for low, high in ranges) / spacing


def _window(steps: Steps, spacing: float, direction: int) -> tuple[int, int]:
    """Returns grid indices between which all but e^-37 of the mass lies on each side."""
    pmfs = [(step_pmfs(*kind, spacing)[direction], n) for kind, n in steps]
    lowest = sum(n * pmf.first for pmf, n in pmfs)
    highest = sum(n * (pmf.first + pmf.mass.size - 1) for pmf, n in pmfs)
    low, high = (sign * _reach(steps, spacing, direction, sign) / spacing for sign in (-1, 1))
    return max(lowest, math.floor(low)), min(highest, math.ceil(high))


def _reach(steps: Steps, spacing: float, direction: int, sign: int) -> float:
    """Returns x with P[sign L > x] <= e^-37: the least of Chernoff's bounds at s = 2^j."""

    def bound(j: int) -> float:
        total = sum(n * _log_mgf(kind, spacing, direction, sign, j) for kind, n in steps)
        return (total + _LOG_TAIL) * 2.0**-j

    variance = max(sum(n * loss_variance(*kind) for kind, n in steps), 1e-60)
    start = round(0.5 * math.log2(2.0 * _LOG_TAIL / variance))
    best = bound(start)
    for direction_of_j in (-1, 1):  # the bound is quasi-convex in j: walk downhill both ways
        j = start + direction_of_j
        while (trial := bound(j)) < best - spacing:  # less is not worth a look
            best, j = trial, j + direction_of_j
    return best


@lru_cache(maxsize=1 << 16)
def _log_mgf(kind: SampledGaussian, spacing: float, direction: int, sign: int, j: int) -> float:
    """Returns log E[exp(s L); L finite] of one step at s = sign 2^j."""
    pmf = step_pmfs(*kind, spacing)[direction]
    exponent = pmf.log_mass + (sign * 2.0**j * spacing) * np.arange(
        pmf.first, pmf.first + pmf.mass.size
    )
    top = float(exponent.max())
    return top + math.log(float(np.exp(exponent - top).sum()))


def _compose(steps: Steps, spacing: float, direction: int, low: int, high: int) -> DeltaCurve:
    """Returns the curve of the composed loss, computed on the circle of grid points low..high.

    What lies above the window wraps around to its low end and is added back; what lies below
    wraps around to the high end, where it only makes delta larger.
    """
    size = _fft_size(high - low + 1)
    spectrum = reduce(
        np.multiply, (_power(_spectrum(kind, spacing, direction, size), n) for kind, n in steps)
    )
    circle = np.fft.irfft(spectrum, size)
    noise = _rounding(circle, sum(n for _, n in steps))
    infinite = sum(n * step_pmfs(*kind, spacing)[direction].infinite for kind, n in steps)
    first = max(0, low)
    window = np.take(circle, np.arange(first, max(low + size, first + 1)), mode="wrap")
    missing = infinite + math.exp(-_LOG_TAIL) + noise
    return DeltaCurve.of(first, spacing, np.maximum(window, 0.0), missing)


def _rounding(circle: Floats, total: int) -> float:
    """Returns a bound on the summed rounding errors of a pmf composed of `total` losses by FFT.

    An FFT errs by a few eps in the 2-norm, and a power of a spectrum by eps times the exponent.
    """
    energy = float(np.square(circle).sum())  # not a BLAS dot: its threads cost milliseconds here
    return 2.3e-16 * (4.0 * math.log2(circle.size) + total) * math.sqrt(circle.size * energy)


def _fft_size(points: int) -> int:
    """Returns a size >= points that is 2^k or 3 2^k: fast, and few, so that spectra are reused."""
    power = 1 << max(4, (points - 1).bit_length())
    return 3 * power // 4 if points <= 3 * power // 4 else power


@lru_cache(maxsize=16)
def _spectrum(
    kind: SampledGaussian, spacing: float, direction: int, size: int
) -> NDArray[np.complex128]:
    """Returns the FFT of one step's pmf, laid on a circle of `size` grid points."""
    pmf: LossPmf = step_pmfs(*kind, spacing)[direction]
    places = np.arange(pmf.first, pmf.first + pmf.mass.size) % size
    return np.fft.rfft(np.bincount(places, weights=pmf.mass, minlength=size))


def _power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """Returns base**exponent by squaring, which is faster and more exact than complex pow."""
    result = None
    while True:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if exponent == 0:
            return base if result is None else result
        base = base * base
