"""Numbers as people read them."""

import math
from decimal import ROUND_CEILING, Decimal


def epsilon_text(epsilon: float | None) -> str:
    """Return ε with 4 significant digits, rounded up: a printed ε is never below the true one."""
    if epsilon is None or math.isinf(epsilon):
        return "∞"
    if epsilon == 0:
        return "0"
    value = Decimal(epsilon)
    step = Decimal(1).scaleb(value.adjusted() - 3)
    rounded = value.quantize(step, rounding=ROUND_CEILING)
    return f"{rounded.normalize():f}"


def metric_text(name: str, value: float | None) -> str:
    """Return a metric: accuracies in percent, everything else with 4 significant digits."""
    if value is None:
        return "not finite"
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.4g}"
