"""The epsilon of many compositions at one delta, computed by privacy loss distributions.

The method and its guarantee are those of `distribution`. This module is several times faster than
`distribution` because delta is known beforehand. The Rényi curves give the grid's spacing, the
window and a lower bound of epsilon, and only losses above that bound are summed up. Privacy losses
are taken in two directions, "remove" and "add" (`loss_pmf`). No FFT is computed for "add" if
Chernoff's bound shows that "remove" has the larger delta.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from fedsim.accountant.checks import Floats
from fedsim.accountant.composition import Mechanism, SampledGaussian, joint_noise_multiplier
from fedsim.accountant.pld.distribution import pld_epsilon
from fedsim.accountant.pld.fourier import circular, fft_size, power
from fedsim.accountant.pld.loss_pmf import MAX_CELLS, LossPmf, loss_range, loss_variance
from fedsim.accountant.pld.mechanisms import mechanism_pmfs
from fedsim.accountant.pld.privacy_profile import DeltaCurve, gaussian_epsilon
from fedsim.accountant.rdp.curves import rdp_table
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS
from fedsim.accountant.rdp.poisson_batch import log_moment_table

_Steps = tuple[tuple[SampledGaussian, int], ...]

_TARGET_EXCESS = 1e-4
_MAX_POINTS = 1 << 21
_LEAST_DELTA = 1e-8
_BEYOND = 20.0  # e^-20 = 2e-9 of delta may lie outside the window, on each side
_ORDERS = np.array(DEFAULT_ORDERS)
_SLOPES = np.array([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0])


class MechanismCurves:
    """A cache of the RDP curves and log moments of Gaussian mechanisms, sampled or not."""

    def __init__(self) -> None:
        self._rdp: dict[SampledGaussian, Floats] = {}  # at `_ORDERS`
        # Log moment generating function of the "add" loss, at `_SLOPES`.
        self._add: dict[SampledGaussian, Floats] = {}

    def compute(self, kinds: Iterable[SampledGaussian]) -> None:
        """Compute the curves of the mechanisms in `kinds` and add them to the cache.

        Curves that are in the cache already are not computed again.
        """
        new = sorted(set(kinds) - self._rdp.keys())
        if new:
            self._rdp.update(zip(new, rdp_table(new, DEFAULT_ORDERS), strict=True))
            self._add.update(zip(new, _add_curves(new), strict=True))

    def total_rdp(self, steps: _Steps) -> Floats:
        """Return the RDP of a composition at each of `DEFAULT_ORDERS`, float64 (orders,).

        The curves of all mechanisms must be in the cache.
        """
        return _counts(steps) @ np.stack([self._rdp[kind] for kind, _ in steps])

    def total_add(self, steps: _Steps) -> Floats:
        """Return the log moments of a composition's privacy loss, float64 (14,).

        The moments are log E[e^(s L)] at 14 fixed values s > 0. L is the privacy loss for the
        addition of an example (direction "add"). The curves of all mechanisms must be in the cache.
        """
        return _counts(steps) @ np.stack([self._add[kind] for kind, _ in steps])


def _counts(steps: _Steps) -> Floats:
    return np.array([float(count) for _, count in steps])


class _Answer(NamedTuple):
    epsilon: float
    slope: float  # derivative of -log delta at epsilon


def pld_epsilons(
    compositions: Sequence[Mapping[Mechanism, int]],
    delta: float,
    curves: MechanismCurves | None = None,
) -> Floats:
    """Return the epsilon at `delta` of each composition, float64 (compositions,).

    Guarantee: as for `pld_epsilon`, each value is never below the exact one. The grids differ from
    those of `pld_epsilon`, so the two upper bounds may differ by up to 2e-4.

    Args:
        compositions: for each client the number of runs of each mechanism; not empty, counts >= 1.
            If a composition has mechanisms other than Gaussians, `pld_epsilon` computes it.
        delta: in (0, 1). Below 1e-8, where the FFT's rounding matters, `pld_epsilon` computes all
            results.
        curves: cache of curves from earlier calls, to which new mechanisms are added; None uses a
            new cache.
    """
    if delta < _LEAST_DELTA:
        return np.array([pld_epsilon(steps, delta) for steps in compositions])
    jobs = [_normalised(steps) for steps in compositions]
    unique = sorted({job for job in jobs if job})  # equal mechanisms side by side: pmfs are reused
    curves = MechanismCurves() if curves is None else curves
    curves.compute(kind for steps in unique for kind, _ in steps)
    answers = {steps: _epsilon(steps, curves, delta) for steps in unique}
    return np.array(
        [
            answers[job] if job else pld_epsilon(steps, delta)
            for job, steps in zip(jobs, compositions, strict=True)
        ]
    )


def _normalised(steps: Mapping[Mechanism, int]) -> _Steps | None:
    """Return the steps sorted, with all unsampled Gaussians joined into one equivalent Gaussian.

    The result is None if there are other mechanisms, or rates or noise that `distribution` limits.
    """
    plain: Counter[float] = Counter()
    rest: Counter[SampledGaussian] = Counter()
    for kind, count in steps.items():
        if not isinstance(kind, SampledGaussian):
            return None
        if kind.sampling_rate < 1e-9 or not 1e-2 <= kind.noise_multiplier <= 1e6:
            return None
        if kind.sampling_rate == 1.0:
            plain[kind.noise_multiplier] += count
        else:
            rest[kind] += count
    if plain:
        rest[SampledGaussian(1.0, joint_noise_multiplier(plain))] = 1
    return tuple(sorted(rest.items()))


def _add_curves(kinds: Sequence[SampledGaussian]) -> Floats:
    add = np.empty((len(kinds), _SLOPES.size))
    for sampled in (True, False):
        rows = [i for i, kind in enumerate(kinds) if (kind.sampling_rate < 1.0) == sampled]
        rates, noises = np.array([kinds[i] for i in rows]).reshape(-1, 2).T
        add[rows] = (
            _add_moments(rates, noises)
            if sampled
            else _SLOPES * (_SLOPES + 1.0) * (0.5 / noises / noises)[:, None]
        )
    return add


def _add_moments(rates: Floats, noises: Floats) -> Floats:
    """Return log E_mu0[r^-s] at `_SLOPES`; infinity, a trivial bound, where rounding is unsafe."""
    result = np.full((rates.size, _SLOPES.size), math.inf)
    safe = (rates >= 1e-6) & (rates <= 0.9) & (noises >= 0.3) & (noises <= 1e3)
    if safe.any():
        result[safe] = log_moment_table(rates[safe], noises[safe], -_SLOPES)
    return result


def _epsilon(steps: _Steps, curves: MechanismCurves, delta: float) -> float:
    if len(steps) == 1 and steps[0][0].sampling_rate == 1.0:
        return gaussian_epsilon(1.0 / steps[0][0].noise_multiplier, delta)
    rdp = curves.total_rdp(steps)
    bounds = rdp + np.log1p(-1.0 / _ORDERS) - (math.log(delta) + np.log(_ORDERS)) / (_ORDERS - 1.0)
    best = int(np.argmin(bounds))
    upper, slope = float(bounds[best]), float(_ORDERS[best] - 1.0)
    spacing = grid_spacing(steps, slope)
    remove = _one_direction(steps, spacing, 0, rdp, upper, delta)
    if remove is not None and (finer := grid_spacing(steps, remove.slope)) < 0.8 * spacing:
        spacing = finer  # the Rényi bound's slope was too small
        remove = _one_direction(steps, spacing, 0, rdp, upper, delta)
    if remove is None:
        return _by_pld(steps, delta)
    if _add_is_smaller(curves.total_add(steps), remove.epsilon, delta):
        return remove.epsilon
    add = _one_direction(steps, spacing, 1, rdp, upper, delta)
    return _by_pld(steps, delta) if add is None else max(remove.epsilon, add.epsilon)


def _by_pld(steps: _Steps, delta: float) -> float:
    mechanisms: dict[Mechanism, int] = dict(steps)
    return pld_epsilon(mechanisms, delta)


def _add_is_smaller(add: Floats, epsilon: float, delta: float) -> bool:
    """Whether a bound proves that "add" has delta(epsilon) <= delta.

    (1 - e^-x)_+ <= e^(s x) s^s / (s + 1)^(s + 1) for all x, so the moment generating function at
    any s bounds delta. The moments are exact to 1e-8; the margin is 1000 times as large.
    """
    constant = _SLOPES * np.log(_SLOPES) - (_SLOPES + 1.0) * np.log1p(_SLOPES)
    bound = float((add - _SLOPES * epsilon + constant).min())
    return bound < math.log(delta) - 1e-5


def grid_spacing(steps: _Steps, slope: float) -> float:
    """Return the grid spacing h at which epsilon is at most about 1e-4 too large.

    Rounding privacy losses to the grid raises the epsilon of T steps by about T h^2 (s + 1) / 12. h
    is a power of 2^(1/4). So clients with the same mechanism often use the same grid, and the loss
    distribution of the mechanism is computed once.

    Args:
        steps: mechanisms and their counts.
        slope: s, the best Rényi order minus 1.
    """
    total = sum(count for _, count in steps)
    deviation = math.sqrt(sum(count * loss_variance(*kind) for kind, count in steps))
    excess = _TARGET_EXCESS * min(1.0, 10.0 * deviation + 1e-9)
    spacing = math.sqrt(12.0 * excess / (total * (1.0 + slope)))
    return 2.0 ** min(-6.0, math.floor(4.0 * math.log2(spacing)) / 4.0)


def _one_direction(
    steps: _Steps, spacing: float, direction: int, rdp: Floats, upper: float, delta: float
) -> _Answer | None:
    """Return the epsilon of one direction; None if the grid is too large or too coarse for it.

    Args:
        steps: the composition.
        spacing: the grid's spacing.
        direction: 0 for "remove", 1 for "add".
        rdp: the composition's RDP at `_ORDERS`; it only chooses the window.
        upper: an upper bound of epsilon, by Rényi DP.
        delta: in (0, 1).
    """
    ranges = (loss_range(*kind) for kind, _ in steps)
    if max(high - low for low, high in ranges) > MAX_CELLS * spacing:
        return None
    pmfs = [(mechanism_pmfs(kind, spacing)[direction], count) for kind, count in steps]
    low, high = _window(pmfs, spacing, rdp, delta)
    if high - low >= _MAX_POINTS:
        return None
    circle, noise = _circle(pmfs, high - low + 1)
    missing = sum(n * pmf.infinite for pmf, n in pmfs) + delta * math.exp(-_BEYOND) + noise
    if missing > 0.1 * delta:
        return None
    # Epsilon is rarely below half of its Rényi bound: search there first, then everywhere.
    for start in (max(0, low, math.floor(0.5 * upper / spacing)), max(0, low)):
        window = np.take(circle, np.arange(start, max(low + circle.size, start + 1)), mode="wrap")
        curve = DeltaCurve.of(start, spacing, np.maximum(window, 0.0), missing)
        if curve.at_points[0] + missing > delta:
            break
    epsilon = curve.epsilon(delta)
    here, above = curve.delta(epsilon) - missing, curve.delta(epsilon + spacing) - missing
    return _Answer(epsilon, math.log(here / above) / spacing if 0.0 < above < here else 0.0)


def _window(
    pmfs: Sequence[tuple[LossPmf, int]], spacing: float, rdp: Floats, delta: float
) -> tuple[int, int]:
    """Return the least and largest grid index; at most e^-20 delta lies beyond each (Chernoff)."""
    lowest = sum(count * pmf.first for pmf, count in pmfs)
    highest = sum(count * pmf.last for pmf, count in pmfs)
    tail = _BEYOND - math.log(delta)
    order = int(np.argmin(rdp + tail / (_ORDERS - 1.0)))
    slope = float(_ORDERS[order]) - 1.0
    high = (_log_mgf(pmfs, slope * spacing) + tail) / slope / spacing
    variance = sum(count * _variance(pmf) for pmf, count in pmfs)  # in grid units
    low = -_low_reach(pmfs, tail, math.sqrt(2.0 * tail / max(variance, 1e-30)))
    return max(lowest, math.floor(low)), min(highest, math.ceil(high))


def _low_reach(pmfs: Sequence[tuple[LossPmf, int]], tail: float, slope: float) -> float:
    """Return x with P[L / spacing < -x] <= e^-tail, by Chernoff's bound at `slope` or near it."""

    def bound(slope: float) -> float:
        return (_log_mgf(pmfs, -slope) + tail) / slope

    best = bound(slope)
    for factor in (0.5, 2.0):  # quasi-convex in the slope; "add" has a long low tail
        trial = slope * factor
        while (value := bound(trial)) < best - 0.01 * abs(best):
            best, trial = value, trial * factor
    return best


def _log_mgf(pmfs: Sequence[tuple[LossPmf, int]], slope: float) -> float:
    """Return log E[exp(slope * L / spacing); L finite] of the composition."""
    return sum(count * pmf.log_mgf(slope) for pmf, count in pmfs)


def _variance(pmf: LossPmf) -> float:
    mean = float((pmf.mass * pmf.places).sum())
    return float((pmf.mass * np.square(pmf.places - mean)).sum())


def _circle(pmfs: Sequence[tuple[LossPmf, int]], points: int) -> tuple[Floats, float]:
    """Return the composed pmf on a circle of >= `points` points, and a bound on its rounding."""
    size = fft_size(points)
    spectrum = reduce(np.multiply, (power(pmf.spectrum(size), count) for pmf, count in pmfs))
    return circular(spectrum, size, sum(count for _, count in pmfs))
