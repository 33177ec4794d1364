"""The exact privacy of unsampled Gaussians (Balle, Wang 2018, arXiv:1805.06530, Theorem 8).

On two neighbouring data sets, the outputs of a release with noise multiplier z are Gaussians whose
means are at most mu = 1/z standard deviations apart. Releases with noise multipliers z_1 ... z_T
are together one release with mu = sqrt(sum of z_t^-2).
"""

import math

import numpy as np
from scipy.special import erfcx, log_ndtr

from fedsim.accountant import checks
from fedsim.accountant.search import root_between

_MAX_MU = 1e8  # epsilon is about 5e15 there: no guarantee is left to compute
_LEAST_MU = 1e-290  # smaller mu are raised to it: still a bound, and epsilon stays a normal number
_LOG_ROUNDING = 2e-15  # of log delta, relative; subtracted from the delta that is solved for
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
_REACH = 48.0  # e^-48 = 1e-21 of the integrand is left out


def gaussian_log_delta(mu: float, epsilon: float) -> float:
    """Return log delta(epsilon) of the pair N(mu, 1), N(0, 1), exact even where delta underflows.

    Guarantee: the pair dominates a Gaussian release with noise multiplier 1/mu, in both
    directions, so the release is (epsilon, delta)-DP.

    Args:
        mu: distance of the two Gaussians in standard deviations, > 0, finite.
        epsilon: >= 0, finite.

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> import math
        >>> from fedsim.accountant.gaussian import gaussian_log_delta
        >>> round(math.exp(gaussian_log_delta(mu=1.0, epsilon=1.0)), 4)
        0.1269
    """
    mu = checks.positive("mu", mu)
    epsilon = checks.non_negative("epsilon", epsilon)
    return _log_delta(mu, epsilon)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the least epsilon >= 0 at which N(mu, 1) against N(0, 1) has the given `delta`.

    The result is exact to 1e-12 relative.

    Edge cases: mu above 1e8 gives infinity.

    Args:
        mu: distance of the two Gaussians in standard deviations, > 0, finite.
        delta: in (0, 1).

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> from fedsim.accountant.gaussian import gaussian_epsilon
        >>> round(gaussian_epsilon(mu=0.5, delta=1e-5), 3)  # a noise multiplier of 2
        1.993
    """
    mu = checks.positive("mu", mu)
    log_delta = math.log(checks.open_probability("delta", delta))
    if mu > _MAX_MU:
        return math.inf
    mu = max(mu, _LEAST_MU)
    if _log_delta(mu, 0.0) <= log_delta:
        return 0.0
    # Zero-concentrated DP bounds epsilon from above (Bun, Steinke 2016, Proposition 1.3).
    upper = 0.5 * mu + math.sqrt(-2.0 * log_delta) + 1e-9
    aim = log_delta - _LOG_ROUNDING * (1.0 - log_delta)
    root = root_between(
        lambda ratio: _log_delta(mu, mu * ratio) - aim, 0.0, upper, absolute=1e-300, relative=1e-14
    )
    return mu * root * (1.0 + 2e-14)  # at or above the root whatever the solver rounded


def _log_delta(mu: float, epsilon: float) -> float:
    """Return log of Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    near, far = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    if mu < 1.0:
        # The two parts are alike. Their difference is the integral over s > 0 of
        # phi(near + s) (1 - e^(-mu s)), where nothing cancels.
        scale = _REACH / (near + math.sqrt(near * near + 2.0 * _REACH)) * 2.0
        s = 0.5 * scale * (_NODES + 1.0)
        density = np.exp(-s * (near + 0.5 * s)) * -np.expm1(-mu * s) / mu
        total = 0.5 * scale * float(_WEIGHTS @ density) / math.sqrt(2.0 * math.pi)
        return math.log(total) + math.log(mu) - 0.5 * near * near
    if near > -1.0:
        # Both parts share the factor phi(near); what is left, Mills ratios, stays of order 1.
        gap = float(erfcx(near / math.sqrt(2.0)) - erfcx(far / math.sqrt(2.0)))
        return math.log(0.5 * max(gap, 5e-324)) - 0.5 * near * near
    first, second = float(log_ndtr(-near)), epsilon + float(log_ndtr(-far))
    return first + math.log(-math.expm1(min(second - first, -1e-300)))
