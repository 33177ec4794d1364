"""RDP of choosing the best of several runs (Papernot, Steinke 2022, arXiv:2110.03620)."""

import math

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.arrays import Floats
from fedsim.accountant.rdp.conversion import delta_from_rdp
from fedsim.accountant.search import root_between


def rdp_repeat_and_select(
    orders: tuple[float, ...], rdp: Floats, mean: float, shape: float | None
) -> Floats:
    """Return the RDP of running a mechanism K times and releasing the best result only.

    Guarantee: if one run is (orders[i], rdp[i])-RDP for every i, then the selection is
    (orders[i], value[i])-RDP, provided K is drawn independently of the data and stays secret.

    Truncated negative binomial K, eta = shape (Theorem 2):
        rdp(a) + log E[K] / (a - 1) + (1 + eta) min over a' of ((1 - 1/a') rdp(a') - log(gamma)/a').
    Poisson K (Theorem 6): rdp(a) + log E[K] / (a - 1) + E[K] delta, where one run is
    (log(1 + 1/(a - 1)), delta)-DP. RDP does not decrease in its order, so each value is also a
    bound at all smaller orders.

    Args:
        orders: Rényi orders, each > 1.
        rdp: RDP of one run at each order.
        mean: E[K] >= 1.
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
    """Return log(1/gamma) of the truncated negative binomial with this mean, to 1e-12, rounded up.

    With y = log(1/gamma), E[K] = eta (e^y - 1) / (1 - e^(-eta y)), and (e^y - 1) / y for eta = 0
    (Definition 1); it rises with y. A larger y only raises the RDP bound.

    Args:
        mean: E[K] >= 1, the expected number of runs.
        shape: eta >= 0.
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
