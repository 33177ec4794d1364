"""Log moments between whole orders: an upper bound by their convexity."""

import numpy as np

from fedsim.accountant.arrays import Floats


def interpolate_log_moments(whole_orders: Floats, moments: Floats, orders: Floats) -> Floats:
    """Return the chord between the log moments at the whole orders around each order.

    Args:
        whole_orders: increasing whole numbers >= 2; must contain floor and ceil of every order
            above 1 (order 1 itself is known: its moment is 0).
        moments: the log moment at each of them; infinity is allowed.
        orders: > 1, any shape.
    """
    low, high = np.floor(orders), np.ceil(orders)
    table = dict(zip((1.0, *whole_orders.tolist()), (0.0, *moments.tolist()), strict=True))
    at_low, at_high = (np.array([table[k] for k in side.tolist()]) for side in (low, high))
    part = orders - low
    with np.errstate(invalid="ignore"):  # 0 times infinity where the order is whole
        chord = (1.0 - part) * at_low + part * at_high
    return np.where(part == 0.0, at_low, chord)
