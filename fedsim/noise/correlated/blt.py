"""Buffered linear Toeplitz strategies: almost the error of the best Toeplitz matrix, few buffers.

Let C be the strategy's lower-triangular Toeplitz matrix. Entry j ≥ 1 of the first column of C is
Σ_i s_i λ_i^(j − 1), with scales s and decays λ of d buffers (Dvijotham et al. 2024,
arXiv:2404.16706; McMahan et al. 2024, arXiv:2408.08868). The noise y_t of round t depends on that
of earlier rounds only through the d buffers S_i = Σ_j λ_i^(j − 1) y_{t−j}.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fedsim.accountant.checks import Floats
from fedsim.noise.correlated.settings import MinSeparation
from fedsim.noise.correlated.strategies import ToeplitzStrategy
from fedsim.noise.sources import MAX_DRAW

MIN_BUFFERS, MAX_BUFFERS = 2, 5


@dataclass(frozen=True)
class BltStrategy(ToeplitzStrategy):
    """Strategy of correlated noise whose matrix entries are sums of few decaying exponentials.

    Attributes:
        scales: scales s_i > 0 of the buffers, which add up to at most 1.
        decays: decays λ_i of the buffers, in (0, 1).

    Raises:
        ValueError: a number is outside its range, or there are not as many scales as decays.
    """

    scales: tuple[float, ...]
    decays: tuple[float, ...]

    def __post_init__(self) -> None:
        if not MIN_BUFFERS <= len(self.scales) == len(self.decays) <= MAX_BUFFERS:
            raise ValueError(
                f"scales and decays must have one number for each of {MIN_BUFFERS} to "
                f"{MAX_BUFFERS} buffers, got {len(self.scales)} and {len(self.decays)}"
            )
        if min(self.scales) <= 0.0 or sum(self.scales) > 1.0:
            raise ValueError(f"scales must be above 0 and add up to at most 1, got {self.scales}")
        if not 0.0 < min(self.decays) <= max(self.decays) < 1.0:
            raise ValueError(f"decays must be above 0 and below 1, got {self.decays}")

    @property
    def buffers(self) -> int:
        """Number of buffers: weighted sums of earlier noise, each as large as the model."""
        return len(self.scales)

    def coefficients(self, rounds: int) -> Floats:
        """Return the first column of the strategy's Toeplitz matrix C, (rounds,)."""
        powers = np.power.outer(np.array(self.decays), np.arange(rounds - 1))
        return np.concatenate([[1.0], np.array(self.scales) @ powers])

    def inverse(self, rounds: int) -> Floats:
        """Return the first column of the inverse of the strategy's matrix C, (rounds,)."""
        return self._response(rounds)[0]

    def _response(self, rounds: int) -> tuple[Floats, Floats]:
        """Return what one draw does later: the inverse (rounds,), and Σ |S_i| of each buffer."""
        if rounds not in self._responses:
            scales, decays = np.array(self.scales), np.array(self.decays)
            column, buffers, sizes = np.zeros(rounds), *np.zeros((2, self.buffers))
            for t in range(rounds):
                column[t] = (t == 0) - scales @ buffers
                buffers = decays * buffers + column[t]
                sizes += np.abs(buffers)
            self._responses[rounds] = column, sizes
        return self._responses[rounds]

    @cached_property
    def _responses(self) -> dict[int, tuple[Floats, Floats]]:
        return {}

    def extra_roundings(self, participation: MinSeparation) -> int:
        """Return the number of rounds in which one client moves a release by rounding alone.

        These are all rounds after the first one. The sum of the float64 buffers has an error of at
        most e grid steps, so a release may move by up to 1 + 2 e grid steps. Each such round counts
        (1 + 2 e)² times, as if it moved by 1 grid step (docs/explain/proofs.md).
        """
        later = participation.rounds - 1
        return math.ceil(later * (1.0 + 2.0 * self.buffer_error(participation.rounds)) ** 2)

    def buffer_error(self, rounds: int) -> float:
        """Return an upper bound on the rounding error of the sum of scaled buffers, in grid steps.

        Args:
            rounds: number of rounds of the run.
        """
        error = 0.0
        for scale, decay, size in zip(
            self.scales, self.decays, self._response(rounds)[1], strict=True
        ):
            length = min(float(rounds), 1.0 / (1.0 - decay))  # rounds until an error is forgotten
            error += scale * float(size) * (2.0 * length + self.buffers + 1.0)
        # Of draws with and without the client, whose part is below 2³⁰ as well: see the proof.
        return 1.01 * 2.0 * MAX_DRAW * 2.0**-53 * error


_APART = 1e-9  # least relative difference of zeros and poles: equal ones would have a scale of 0


@lru_cache(maxsize=64)
def optimised_blt(buffers: int, participation: MinSeparation, momentum: float = 0.0) -> BltStrategy:
    """Return the buffered linear Toeplitz strategy with the least noise in the models at a given ε.

    The noise is the root mean square error of the models after 1, 2, ... rounds. The model after t
    rounds is the sum of the updates of the first t rounds.

    Args:
        buffers: number of buffers, 2 to 5.
        participation: bound on the rounds of a client.
        momentum: momentum β of the server's optimizer, in [0, 1): the update of a round is β times
            that of the round before, plus the release.
    """
    from scipy.optimize import minimize  # imported here: it is slow, and few runs need it

    rounds = participation.rounds
    if rounds == 1:
        return BltStrategy((0.1,) * buffers, tuple(i / 10 for i in range(1, buffers + 1)))

    def loss(shares: Floats) -> float:
        zeros, poles = _zeros_and_poles(shares, rounds)
        squared = _squared_sensitivity(zeros, poles, participation)
        return math.log(squared) + math.log(_squared_error(zeros, poles, momentum, rounds))

    # A buffer that decays much slower than b rounds costs as much as it saves.
    steps = np.linspace(0.4, math.log(max(participation.rounds_apart, 10)), 2 * buffers)
    shares = np.diff(steps, prepend=0.0, append=max(math.log(4.0 * rounds), steps[-1] + 0.1))
    start = np.log(shares[:-1] / shares[-1])
    result = minimize(loss, start, method="BFGS", options={"gtol": 1e-5})
    zeros, poles = _zeros_and_poles(np.asarray(result.x), rounds)
    decays = tuple(round(1.0 - gap, 12) for gap in _rounded(poles))
    scales = _scales(poles, zeros)
    return BltStrategy(_rounded(scales / max(1.0, scales.sum() * (1.0 + 1e-5))), decays)


def _zeros_and_poles(shares: Floats, rounds: int) -> tuple[Floats, Floats]:
    """Return zeros and poles of C(x) = Π (1 − zero x) / Π (1 − pole x), as gaps 1 − value.

    The zeros of C are the poles of its inverse. They ascend interlaced, so that all scales are
    positive. No gap is below 1 / (4 rounds), where a buffer would not decay within the run.

    Args:
        shares: logarithms of the relative differences of successive values of −log(gap); that of
            the last difference, up to the largest value, is 0.
        rounds: number of rounds of the run.
    """
    weights = np.exp(np.append(shares, 0.0) - max(float(shares.max()), 0.0)) + _APART
    gaps = np.exp(-np.cumsum(weights)[:-1] / weights.sum() * math.log(4.0 * rounds))
    return gaps[::2], gaps[1::2]


def _scales(poles: Floats, zeros: Floats) -> Floats:
    """Return the scales s_i of 1 + Σ s_i x / (1 − pole_i x), by partial fractions, from gaps."""
    above = (zeros[None, :] - poles[:, None]).prod(axis=1)
    apart = poles[None, :] - poles[:, None]
    np.fill_diagonal(apart, 1.0)
    return above / apart.prod(axis=1)


def _squared_sensitivity(zeros: Floats, poles: Floats, participation: MinSeparation) -> float:
    """Return the squared sensitivity; zeros and poles are gaps.

    From one turn of the client to its next one, the client moves C f by a sum of exponentials. This
    is for the search alone: what is charged is the sum over all coefficients.
    """
    apart, most = participation.rounds_apart, participation.max_rounds
    places, weights = _places(most)
    turns = np.append(places, most - 1.0)  # the last one alone, which may be longer or shorter
    scales, decay = _scales(poles, zeros), np.log1p(-poles)
    earlier = np.expm1(apart * np.outer(turns, decay)) / np.expm1(apart * decay)
    earlier *= np.exp((apart - 1) * decay)  # Σ decay^(l · apart − 1) over the turns before
    first = (1.0 + earlier @ scales)[:-1]  # in the round of a turn; r rounds later, moved · decay^r
    moved = scales * (1.0 + np.exp(decay) * earlier)
    rates = decay[:, None] + decay[None, :]
    whole, last = (
        np.expm1((length - 1) * rates) / np.expm1(rates)
        for length in (apart, participation.rounds - (most - 1) * apart)
    )
    later = (moved[:-1].T * weights) @ moved[:-1] * whole
    later += np.outer(moved[-1], moved[-1]) * (last - whole)
    return float(weights @ first**2 + later.sum())


def _squared_error(zeros: Floats, poles: Floats, momentum: float, rounds: int) -> float:
    """Return the sum of the variances of all models' noise; zeros and poles are gaps."""
    # Noise of a round moves the sum of the next t ones by 1 + Σ scale (1 − zero^t) / gap.
    heights = np.append(-_scales(zeros, poles) / zeros, (poles / zeros).prod())
    decay = np.append(np.log1p(-zeros), 0.0)[:, None]
    forgets = math.log(momentum) if momentum else -math.inf
    places, weights = _places(rounds)
    # Σ_j zero^j momentum^(t − j), from the larger of both and their ratio, which may be nearly 1.
    ratio = np.minimum(-np.abs(decay - forgets), -1e-12)
    moved = np.exp(places * np.maximum(decay, forgets)) * np.expm1((places + 1.0) * ratio)
    return float(weights * (rounds - places) @ (heights @ (moved / np.expm1(ratio))) ** 2)


@lru_cache(maxsize=4)
def _places(count: int) -> tuple[Floats, Floats]:
    """Return places and weights that give sums over 0 ... count − 1 of sums of exponentials.

    They are the first 256 numbers and then Gauss points, as functions change slowly there.
    """
    exact = min(count, 256)
    places, weights = [np.arange(exact, dtype=np.float64)], [np.ones(exact)]
    points, parts = np.polynomial.legendre.leggauss(16)
    while exact < count:
        half = (min(2 * exact, count) - exact) / 2.0
        places.append(exact - 0.5 + half * (1.0 + points))
        weights.append(half * parts)
        exact = min(2 * exact, count)
    return np.concatenate(places), np.concatenate(weights)


def _rounded(values: Floats) -> tuple[float, ...]:
    """Return positive numbers with five digits, far finer than the error depends on them."""
    return tuple(float(f"{value:.5g}") for value in values)
