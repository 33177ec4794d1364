"""Exact composition of sampled and unsampled Gaussians by privacy loss distributions and the FFT.

Each step's privacy loss is rounded to a grid so that the discrete loss dominates the true one
(`loss_pmf`). The loss L of the composition has the convolution of the discrete distributions
(Koskela, Jälkö, Honkela 2020, arXiv:1906.03049). Then delta(epsilon) = E[(1 - e^(epsilon - L))_+].

Every error that could lower delta is added back: the mass beyond the window and beyond each step's
grid, and the rounding noise of the FFT. So the results are upper bounds. For T steps, grid spacing
h and best Rényi order s + 1, they exceed the exact epsilon by about T h^2 (s + 1) / 12, since
rounding adds variance h^2/6 to each loss. `_grid` chooses h to keep this near 1e-4. h is a power of
two. Near a change of h the pmfs on both grids are mixed with gradually changing weights; the
mixture gives an upper bound, too. So epsilon does not fall when a step is added, up to rounding
(1e-9 relative).

`Concentrated` (zCDP) and `Selection` have an RDP curve but no dominating pair. A composition with
either uses RDP.

If delta is near or below what the FFT resolves (about 1e-13 for hundreds of steps), the losses are
tilted (`fourier`). In two cases the result is that of Rényi DP, also an upper bound. One is a delta
below about 1e-16 for thousands of steps, as the probability of an infinite loss then matters. The
other is a composition that would need a grid spacing above 1/8.
"""

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np

from fedsim.accountant.checks import Complexes, Floats, cached_by_bytes
from fedsim.accountant.composition import (
    AllocatedGaussian,
    Approximate,
    Concentrated,
    FixedSizeGaussian,
    Mechanism,
    ReplacedGaussian,
    SampledGaussian,
    Selection,
    joint_noise_multiplier,
    sort_steps,
)
from fedsim.accountant.pld.fourier import circular, log_mgf, power, tilted_profile
from fedsim.accountant.pld.loss_pmf import MAX_CELLS
from fedsim.accountant.pld.mechanisms import (
    Dominated,
    mechanism_pmfs,
    mechanism_range,
    mechanism_variance,
)
from fedsim.accountant.pld.privacy_profile import (
    DeltaCurve,
    PrivacyProfile,
    composed_delta,
    composed_epsilon,
    exactly_composable,
    gaussian_epsilon,
    gaussian_log_delta,
)
from fedsim.accountant.rdp.conversion import delta_from_rdp, epsilon_from_rdp
from fedsim.accountant.rdp.curves import leak, total_rdp
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS

_Counts = tuple[tuple[Mechanism, int], ...]
_Steps = tuple[tuple[Dominated, int], ...]

_TARGET_EXCESS = 1e-4
_MAX_POINTS = 1 << 21
_COARSEST = 0.125
_BLEND = 0.1  # share of an octave of h over which one grid gives way to the next
_NATS_BELOW = (7.0, 0.5)  # of log delta, below a bound: where tilted losses begin
_LOG_TAIL = 37.0  # e^-37 = 9e-17 of the composed mass may lie outside the window, on each side
_CACHE_BYTES = 128 << 20  # for spectra, and again for profiles
# Outside these limits less noise or more sampling is assumed: a bound, and the grid keeps digits.
_MOST_NOISE, _LEAST_RATE = 1e9, 1e-100
_LEAST_ALLOCATED_NOISE, _MOST_ALLOCATED_NOISE, _MOST_BATCHES = 0.2, 1e4, 1 << 40


def pld_epsilon(steps: Mapping[Mechanism, int], delta: float) -> float:
    """Return the epsilon at `delta` of the composition of all steps.

    Guarantee: the composition is (epsilon, delta)-DP under the adjacency for which the events were
    translated to mechanisms.

    Args:
        steps: number of runs of each mechanism; not empty, counts >= 1.
        delta: in (0, 1).
    """
    return _epsilon(_normalise(tuple(steps.items())), delta)


def pld_delta(steps: Mapping[Mechanism, int], epsilon: float) -> float:
    """Return the delta at `epsilon` of the composition of all steps.

    Guarantee: the composition is (epsilon, delta)-DP, as for `pld_epsilon`.

    Args:
        steps: number of runs of each mechanism; not empty, counts >= 1.
        epsilon: finite, >= 0.
    """
    return _delta(_normalise(tuple(steps.items())), epsilon)


@lru_cache(maxsize=1 << 8)  # a curve asks for the same steps hundreds of times
def _normalise(steps: _Counts) -> _Counts:
    """Return the steps sorted, with all unsampled Gaussians joined into one equivalent Gaussian."""
    plain: Counter[float] = Counter()
    rest: Counter[Mechanism] = Counter()
    for mechanism, count in steps:
        match mechanism:
            case SampledGaussian(rate, noise) if rate == 1.0:
                plain[min(noise, _MOST_NOISE)] += count
            case SampledGaussian(rate, noise):
                rest[SampledGaussian(max(rate, _LEAST_RATE), min(noise, _MOST_NOISE))] += count
            case ReplacedGaussian(rate, noise):
                rest[ReplacedGaussian(max(rate, _LEAST_RATE), min(noise, _MOST_NOISE))] += count
            case FixedSizeGaussian(rate, noise):
                rest[FixedSizeGaussian(rate, min(noise, _MOST_NOISE))] += count
            case AllocatedGaussian(batches, noise) if noise >= _LEAST_ALLOCATED_NOISE:
                allocated = min(batches, _MOST_BATCHES), min(noise, _MOST_ALLOCATED_NOISE)
                rest[AllocatedGaussian(*allocated)] += count
            case AllocatedGaussian(_, noise):  # bounded by a pass whose batches are known
                plain[noise] += count
            case _:
                rest[mechanism] += count
    if plain:
        rest[SampledGaussian(1.0, joint_noise_multiplier(plain))] = 1
    return sort_steps(rest)


@lru_cache(maxsize=1 << 12)
def _epsilon(counts: _Counts, delta: float) -> float:
    kinds = exactly_composable(counts)
    if kinds is not None:
        return composed_epsilon(kinds, delta)
    steps = _dominated(counts)
    if steps is None:
        return _epsilon_by_rdp(counts, delta)[0]
    mu = _plain_mu(steps)
    if mu is not None:
        return gaussian_epsilon(mu, delta)
    profile = _composed(steps)
    if profile is not None and delta >= profile.resolution:
        return profile.epsilon(delta)
    epsilon, order = _epsilon_by_rdp(counts, delta)
    if profile is None or epsilon == math.inf:
        return epsilon
    epsilon = min(epsilon, profile.epsilon(delta))
    for nats in _NATS_BELOW:  # rounding matters less the closer this is to epsilon
        least = max(profile.spacing, epsilon - nats / (order - 1.0))
        tilted = tilted_profile(steps, profile.spacing, order - 1.0, least)
        epsilon = epsilon if tilted is None else min(epsilon, max(least, tilted.epsilon(delta)))
    return epsilon


@lru_cache(maxsize=1 << 12)
def _delta(counts: _Counts, epsilon: float) -> float:
    kinds = exactly_composable(counts)
    if kinds is not None:
        return composed_delta(kinds, epsilon)
    steps = _dominated(counts)
    if steps is None:
        return _delta_by_rdp(counts, epsilon)[0]
    mu = _plain_mu(steps)
    if mu is not None:
        return math.exp(gaussian_log_delta(mu, epsilon))
    profile = _composed(steps)
    delta = profile.delta(epsilon) if profile else 1.0
    if profile is None or delta < profile.resolution:
        delta = min(delta, _delta_by_rdp(counts, epsilon)[0])
        if profile is not None and 0.0 < delta < 1.0:
            order = _epsilon_by_rdp(counts, delta)[1]  # as `_epsilon` takes it
            tilted = tilted_profile(steps, profile.spacing, order - 1.0, epsilon)
            delta = delta if tilted is None else min(delta, tilted.delta(epsilon))
    return delta


def _epsilon_by_rdp(counts: _Counts, delta: float) -> tuple[float, float]:
    rdp = total_rdp(counts, DEFAULT_ORDERS)
    return epsilon_from_rdp(DEFAULT_ORDERS, rdp, delta, leak=leak(counts))


def _delta_by_rdp(counts: _Counts, epsilon: float) -> tuple[float, float]:
    rdp = total_rdp(counts, DEFAULT_ORDERS)
    return delta_from_rdp(DEFAULT_ORDERS, rdp, epsilon, leak=leak(counts))


def _dominated(counts: _Counts) -> _Steps | None:
    """Return the steps, or None if a mechanism has no dominating pair."""
    steps: list[tuple[Dominated, int]] = []
    for mechanism, count in counts:
        if isinstance(mechanism, (Concentrated, Selection)):
            return None
        steps.append((mechanism, count))
    return tuple(steps)


def _plain_mu(steps: _Steps) -> float | None:
    """Return 1/z if the steps are a single unsampled Gaussian (a closed form); None otherwise."""
    kind, _ = steps[0]
    if len(steps) == 1 and isinstance(kind, SampledGaussian) and kind.sampling_rate == 1.0:
        return 1.0 / kind.noise_multiplier
    return None


@cached_by_bytes(_CACHE_BYTES)
def _composed(steps: _Steps) -> PrivacyProfile | None:
    """Return the composition's profile, or None if it needs more than `_MAX_POINTS` points."""
    if leak(steps) > 0.5:
        return None  # most of the mass is infinite: a grid would hold too little
    spacing, share = _grid(steps)
    while spacing <= _COARSEST:
        if _cells(steps, spacing) <= MAX_CELLS:
            windows = [_window(steps, spacing, direction) for direction in (0, 1)]
            if max(high - low for low, high in windows) < _MAX_POINTS:
                fine = _profile(steps, spacing, windows)
                if share == 0.0 or 2.0 * spacing > _COARSEST:
                    return _privacy_profile(fine)
                windows = [_window(steps, 2.0 * spacing, direction) for direction in (0, 1)]
                coarse = _profile(steps, 2.0 * spacing, windows)
                return _privacy_profile(
                    [f.mix(c, share) for f, c in zip(fine, coarse, strict=True)]
                )
        spacing, share = 2.0 * spacing, 0.0
    return None


def _grid(steps: _Steps) -> tuple[float, float]:
    """Return the grid's spacing, and the weight of the grid with twice that spacing in the mixture.

    The spacing is a power of two, so that different T and z share their pmfs. The saddle point s of
    the composed loss is about 6 / sqrt(variance) for the usual delta, but the tail of a single step
    limits it to about z^2 log(1/q).
    """
    total = sum(n for _, n in steps)
    deviation = math.sqrt(sum(n * mechanism_variance(kind) for kind, n in steps))
    if deviation == 0.0:
        return 2.0**-6, 0.0
    single = max(_single_saddle(kind) for kind, _ in steps)
    saddle = min(6.0 / deviation, single)
    excess = _TARGET_EXCESS * min(1.0, 10.0 * deviation + 1e-9)
    octave = 0.5 * math.log2(12.0 * excess / (total * (1.0 + saddle)))
    if octave >= -6.0:
        return 2.0**-6, 0.0
    whole = math.floor(octave)
    return 2.0**whole, max(0.0, (octave - whole - 1.0) / _BLEND + 1.0)


def _single_saddle(kind: Dominated) -> float:
    if isinstance(kind, Approximate):
        return math.inf
    z = kind.noise_multiplier
    q = 1.0 / kind.batches if isinstance(kind, AllocatedGaussian) else kind.sampling_rate
    return 2.0 * z * z * -math.log(q) + 6.0 * z + 2.0


def _cells(steps: _Steps, spacing: float) -> float:
    ranges = [mechanism_range(kind) for kind, _ in steps]
    return max(high - low for low, high in ranges) / spacing


def _window(steps: _Steps, spacing: float, direction: int) -> tuple[int, int]:
    """Return the least and largest grid index; at most e^-37 of the mass lies beyond either."""
    pmfs = [(mechanism_pmfs(kind, spacing)[direction], n) for kind, n in steps]
    lowest = sum(n * pmf.first for pmf, n in pmfs)
    highest = sum(n * pmf.last for pmf, n in pmfs)
    low, high = (sign * _reach(steps, spacing, direction, sign) / spacing for sign in (-1, 1))
    return max(lowest, math.floor(low)), min(highest, math.ceil(high))


def _reach(steps: _Steps, spacing: float, direction: int, sign: int) -> float:
    """Return x with P[sign L > x] <= e^-37, by the best Chernoff bound over s = 2^j."""

    def bound(j: int) -> float:
        total = sum(n * log_mgf(kind, spacing, direction, sign * 2.0**j) for kind, n in steps)
        return (total + _LOG_TAIL) * 2.0**-j

    variance = max(sum(n * mechanism_variance(kind) for kind, n in steps), 1e-60)
    start = round(0.5 * math.log2(2.0 * _LOG_TAIL / variance))
    best = bound(start)
    for direction_of_j in (-1, 1):  # the bound is quasi-convex in j: walk downhill both ways
        j = start + direction_of_j
        while (trial := bound(j)) < best - spacing:  # smaller gains do not matter
            best, j = trial, j + direction_of_j
    return best


class _Tail(NamedTuple):
    """The part of a composed loss at and above 0, on the grid."""

    first: int
    spacing: float
    mass: Floats
    missing: float

    def mix(self, coarse: "_Tail", share: float) -> "_Tail":
        """Return the mixture with weight `share` of a loss on a grid of twice the spacing.

        delta is linear in the masses, so a mixture of bounds is a bound.
        """
        first = min(self.first, 2 * coarse.first)
        last = max(self.first + self.mass.size, 2 * (coarse.first + coarse.mass.size) - 1)
        mass = np.zeros(last - first)
        start = self.first - first
        mass[start : start + self.mass.size] = (1.0 - share) * self.mass
        start = 2 * coarse.first - first
        mass[start : start + 2 * coarse.mass.size : 2] += share * coarse.mass
        missing = (1.0 - share) * self.missing + share * coarse.missing
        return _Tail(first, self.spacing, mass, missing)


def _privacy_profile(tails: list[_Tail]) -> PrivacyProfile:
    return PrivacyProfile(tuple(DeltaCurve.of(*tail) for tail in tails))


def _profile(steps: _Steps, spacing: float, windows: list[tuple[int, int]]) -> list[_Tail]:
    remove = _compose(steps, spacing, 0, *windows[0])
    alike = all(len(set(map(id, mechanism_pmfs(kind, spacing)))) == 1 for kind, _ in steps)
    return [remove, remove if alike else _compose(steps, spacing, 1, *windows[1])]


def _compose(steps: _Steps, spacing: float, direction: int, low: int, high: int) -> _Tail:
    """Return the composed loss, computed on the circle of grid points low..high.

    Mass above the window wraps around to its low end and is added back; mass below wraps around
    to the high end, where it only makes delta larger.
    """
    size = _reused_size(high - low + 1)
    spectrum = reduce(
        np.multiply, (power(_spectrum(kind, spacing, direction, size), n) for kind, n in steps)
    )
    circle, noise = circular(spectrum, size, sum(n for _, n in steps))
    pmfs = [(mechanism_pmfs(kind, spacing)[direction], n) for kind, n in steps]
    infinite = -math.expm1(math.fsum(n * math.log1p(-pmf.infinite) for pmf, n in pmfs))
    first = max(0, low)
    window = np.take(circle, np.arange(first, max(low + size, first + 1)), mode="wrap")
    missing = infinite + math.exp(-_LOG_TAIL) + noise
    return _Tail(first, spacing, np.maximum(window, 0.0), missing)


def _reused_size(points: int) -> int:
    """Return a size 2^k or 3 2^k, >= points: fast, and so few that spectra are reused."""
    double = 1 << max(4, (points - 1).bit_length())
    return 3 * double // 4 if points <= 3 * double // 4 else double


@cached_by_bytes(_CACHE_BYTES)
def _spectrum(kind: Dominated, spacing: float, direction: int, size: int) -> Complexes:
    return mechanism_pmfs(kind, spacing)[direction].spectrum(size)
