"""Axes of the figures: metrics, their bounds, and ε on a logarithmic scale."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from fedsim.core.formatting import epsilon_text

_SHARES = ("accuracy", "f1", "auc", "recall", "precision")
_MAX_CURVE_POINTS = 300


def metric_bounds(metric: str) -> tuple[float, float]:
    """Return the smallest and the largest possible value of a metric; infinite without a bound."""
    if any(name in metric for name in _SHARES):
        return 0.0, 1.0
    if metric.endswith(("loss", "mse")):
        return 0.0, math.inf
    return (-math.inf, 1.0) if metric.endswith("r2") else (-math.inf, math.inf)


def metric_axis(axes: Axes, metric: str, *, horizontal: bool = False) -> None:
    """Label an axis of a metric; it does not go beyond the metric's bounds.

    Args:
        axes: the axes, with everything drawn.
        metric: the metric on it.
        horizontal: whether it is the x axis.
    """
    axis = axes.xaxis if horizontal else axes.yaxis
    low, high = axes.get_xlim() if horizontal else axes.get_ylim()
    least, most = metric_bounds(metric)
    margin = 0.02 * (high - low)  # a line on the bound stays whole
    limits = max(low, least - margin), min(high, most + margin)
    (axes.set_xlim if horizontal else axes.set_ylim)(*limits)
    axis.set_major_locator(MaxNLocator(5 if horizontal else 6))
    if metric.endswith("accuracy"):
        decimals = 1 if limits[1] - limits[0] < 0.04 else 0
        axis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))


def epsilon_axis(axes: Axes, epsilons: Sequence[float], beyond: float | None = None) -> None:
    """Make a logarithmic axis with readable numbers.

    Args:
        axes: the axes.
        epsilons: the values of ε on it.
        beyond: the place of clients without privacy; None: there are none.
    """
    low, high = min(epsilons), max([*epsilons, beyond or 0.0])
    axes.set_xscale("log")
    axes.set_xlim(low / 1.35, high * 1.6)
    ticks = sorted({float(epsilon_text(e)) for e in epsilons if e > 0})
    if len(ticks) > 6:
        ticks = [
            step * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for step in (1, 2, 5)
            if low / 1.3 <= step * 10.0**power <= max(epsilons) * 1.3
        ]
    names = {tick: f"{tick:g}" for tick in ticks}
    if beyond is not None:
        names[beyond] = "no privacy"
    axes.xaxis.set_major_locator(FixedLocator(list(names)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: names.get(tick, "")))
    axes.set_xlabel("ε of a run (its largest of any client)")


def client_words(metric: str) -> str:
    """Return the words for a client's metric: `client_r2` is R²."""
    return metric.removeprefix("client_").replace("r2", "R²").replace("mse", "squared error")


def thin(length: int) -> np.ndarray:
    """Return at most about `_MAX_CURVE_POINTS` indices, evenly spread, both ends among them."""
    count = min(length, _MAX_CURVE_POINTS)
    return np.unique(np.linspace(0, length - 1, count).round().astype(int))
