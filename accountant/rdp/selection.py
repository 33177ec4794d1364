"""Selection of the best of a random number K of runs: its RDP, and exact draws of K.

The distributions of K are those of Papernot, Steinke 2022 (arXiv:2110.03620). These are the
truncated negative binomial distribution (Definition 1; shape 1 is the geometric, shape 0 the
logarithmic one) and the Poisson distribution. The RDP holds for a stated distribution, so K must be
drawn from exactly that distribution.
"""

import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.rdp.conversion import delta_from_rdp
from fedsim.accountant.search import root_between


def rdp_repeat_and_select(
    orders: tuple[float, ...], rdp: Floats, mean: float, shape: float | None
) -> Floats:
    """Return the RDP of releasing only the best result of a random number K of runs.

    Guarantee: if one run is (orders[i], rdp[i])-RDP for every i, then the selection is
    (orders[i], value[i])-RDP, provided K is drawn independently of the data and stays secret.

    The RDP at order a is as follows (Papernot, Steinke 2022, arXiv:2110.03620).
    Truncated negative binomial K with eta = shape and parameter gamma (Theorem 2):
        rdp(a) + log E[K] / (a - 1) + (1 + eta) min over a' of ((1 - 1/a') rdp(a') - log(gamma)/a').
    Poisson K (Theorem 6): rdp(a) + log E[K] / (a - 1) + E[K] delta, where one run is
    (log(1 + 1/(a - 1)), delta)-DP. RDP never decreases as the order grows, so each value is also a
    bound at all smaller orders.

    Args:
        orders: Rényi orders, each > 1.
        rdp: RDP of one run at each order.
        mean: expected number of runs, E[K] >= 1.
        shape: eta >= 0 (1 is the geometric, 0 the logarithmic distribution); None for Poisson.

    Raises:
        ValueError: `mean` or `shape` is outside its range.
    """
    mean = checks.at_least_one("mean", mean)
    alphas = np.array(orders)
    result = rdp + math.log(mean) / (alphas - 1.0)
    if shape is None:
        epsilons = np.log1p(1.0 / (alphas - 1.0))
        deltas = [delta_from_rdp(orders, rdp, epsilon)[0] for epsilon in epsilons.tolist()]
        result = result + mean * np.array(deltas)
    else:
        eta = checks.non_negative("shape", shape)
        log_gamma = -log_inverse_gamma(mean, eta)
        result = result + (1.0 + eta) * float(
            np.min((1.0 - 1.0 / alphas) * rdp - log_gamma / alphas)
        )
    ascending = np.argsort(alphas)
    least = np.minimum.accumulate(result[ascending][::-1])[::-1]
    return least[np.argsort(ascending)]


def log_inverse_gamma(mean: float, shape: float) -> float:
    """Return log(1/gamma) for the parameter gamma of a truncated negative binomial distribution.

    The result is rounded up by 1e-12 relative. With y = log(1/gamma), the mean number of runs is
    E[K] = eta (e^y - 1) / (1 - e^(-eta y)), and (e^y - 1) / y for eta = 0 (Papernot, Steinke 2022,
    Definition 1). The mean rises with y, and a larger y only raises the RDP bound.

    Args:
        mean: E[K] >= 1, the expected number of runs.
        shape: parameter eta >= 0 of the distribution.
    """
    if mean == 1.0:
        return 0.0

    def log_mean(y: float) -> float:
        # eta / (1 - e^(-eta y)) = (1/y) w / (1 - e^-w) with w = eta y.
        w = shape * y
        growth = math.log(w / -math.expm1(-w)) if w > 0.0 else 0.0
        return y + math.log(-math.expm1(-y) / y) + growth

    target = math.log(mean)
    high = 1.0
    while log_mean(high) < target:
        high *= 2.0
    root = root_between(
        lambda y: log_mean(y) - target, 1e-300, high, absolute=1e-300, relative=2.0**-50
    )
    return root * (1.0 + 1e-12)


DRAW_BITS = 256
TAIL = 1e-50  # probability of more than `most_runs` runs

_CONTEXT = Context(prec=100, Emin=-(10**9), Emax=10**9)
_NEVER = Decimal("1e-90")  # probabilities below it are no longer added up
_BELOW = 1.0 - 1e-11  # log_inverse_gamma is rounded up by 1e-12: the drawn mean is not larger

DrawBits = Callable[[int], int]


@dataclass(frozen=True)
class RunCountDistribution:
    """The distribution of the number of runs of a selection.

    Guarantee: `rdp_repeat_and_select` with the same mean and shape bounds the RDP of a selection
    whose number of runs comes from `draw`. For this, the mean and the parameter log(1/gamma) of the
    drawn distribution are never above the values that the bound uses.

    Attributes:
        mean: expected number of runs, >= 1.
        shape: parameter eta >= 0 of the truncated negative binomial distribution; None for Poisson.

    Raises:
        ValueError: a value is outside its range.
    """

    mean: float
    shape: float | None

    def __post_init__(self) -> None:
        checks.at_least_one("mean", self.mean)
        if self.shape is not None:
            checks.non_negative("shape", self.shape)

    def probabilities(self) -> Iterator[Decimal]:
        """Yield the probability of 0, 1, 2, ... runs, each to at least 80 significant digits."""
        return self._poisson() if self.shape is None else self._negative_binomial(self.shape)

    def draw(self, bits: DrawBits = secrets.randbits) -> int:
        """Draw a number of runs by inverting the distribution function at a 256-bit uniform number.

        Guarantee: the total variation distance to the exact distribution is below 1e-70.

        Args:
            bits: function that returns the given number of uniform random bits as an int; by
                default they come from the operating system.
        """
        with localcontext(_CONTEXT):
            uniform = Decimal(bits(DRAW_BITS)) / Decimal(2**DRAW_BITS)
            return self._quantile(uniform)

    @property
    def most_runs(self) -> int:
        """Largest number of runs to expect: more runs have probability at most 1e-50."""
        with localcontext(_CONTEXT):
            return self._quantile(1 - Decimal(TAIL))

    def _quantile(self, level: Decimal) -> int:
        total = Decimal(0)
        for runs, probability in enumerate(self.probabilities()):
            total += probability
            if total > level or (runs > self.mean and probability < _NEVER):
                return runs
        raise ArithmeticError("probabilities end")  # pragma: no cover  there is always another

    def _poisson(self) -> Iterator[Decimal]:
        mean = Decimal(self.mean)
        term, runs = (-mean).exp(), 0
        while True:
            yield term
            runs += 1
            term = term * mean / runs

    def _negative_binomial(self, shape: float) -> Iterator[Decimal]:
        yield Decimal(0)
        if self.mean == 1.0:
            yield Decimal(1)
            while True:
                yield Decimal(0)
        y = Decimal(log_inverse_gamma(self.mean, shape) * _BELOW)
        eta, gamma = Decimal(shape), (-y).exp()
        # P[K = 1] = (1 - gamma) eta / (gamma^-eta - 1), and (1 - gamma) / log(1/gamma) for eta = 0.
        term = (1 - gamma) * (eta / ((eta * y).exp() - 1) if eta else 1 / y)
        runs = 1
        while True:
            yield term
            term = term * (1 - gamma) * (runs + eta) / (runs + 1)
            runs += 1


def distribution_text(mean: float, shape: float | None) -> str:
    """Return a description in words of the distribution of the number of runs.

    Args:
        mean: expected number of runs.
        shape: parameter eta of the truncated negative binomial distribution, or None for Poisson.
    """
    names = {None: "Poisson", 0.0: "logarithmic", 1.0: "geometric"}
    if shape in names:
        return f"the {names[shape]} distribution with mean {mean:g}"
    return f"the truncated negative binomial distribution with mean {mean:g} and shape {shape:g}"
