"""Drawings of a privacy profile: the curve δ(ε), and the bound on attacks."""

import math

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from fedsim.core.formatting import delta_text, epsilon_text, percent_text
from fedsim.report.svg import Ink, Tip, inline_svg, style
from fedsim.statement import AttackBound, Profile

_SIZE_INCHES = (330 / 72, 235 / 72)
_MIN_DELTA = 1e-300


def draw_profile(profile: Profile) -> Markup:
    """Return the curve δ(ε) with the pair that is reported marked on it."""
    points = [(epsilon, delta) for epsilon, delta in profile.curve if delta > _MIN_DELTA]
    with style():
        figure, axes = _figure()
        if points:
            axes.plot(*zip(*points, strict=True), color=Ink.ACCENT)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
            axes.minorticks_off()
            axes.set_xlim(points[0][0], points[-1][0] or 1.0)
        _mark(axes, (profile.epsilon, profile.delta))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("ε")
        axes.set_ylabel("δ")
        stride = max(1, len(points) // 40)
        tips = [
            Tip(epsilon, delta, f"ε = {epsilon_text(epsilon)}: δ ≤ {delta_text(delta)}")
            for epsilon, delta in points[::stride]
        ]
        label = (
            f"δ as a function of ε for client {profile.client}; "
            f"δ = {delta_text(profile.delta)} at ε = {epsilon_text(profile.epsilon)}"
        )
        return inline_svg(figure, name="profile", label=label, axes=axes, strips=tips)


def draw_attack(attack: AttackBound) -> Markup:
    """Return the bound on the true-positive rate over the false-positive rate, beside guessing."""
    rates, bounds = attack.false_alarms, attack.detection
    with style():
        figure, axes = _figure()
        axes.fill_between(rates, rates, bounds, color=Ink.BAR, linewidth=0)
        axes.plot(rates, bounds, color=Ink.ACCENT)
        axes.plot(rates, rates, color=Ink.MUTED, linewidth=1.1, linestyle=(0, (4, 3)))
        axes.set_xscale("log")
        axes.set_xlim(rates[0], 1.0)
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xticks([1e-4, 1e-3, 1e-2, 1e-1, 1.0], ["0.01%", "0.1%", "1%", "10%", "100%"])
        axes.minorticks_off()
        axes.annotate(
            "guessing",
            (0.14, 0.14),
            xytext=(6, -8),
            textcoords="offset points",
            color=Ink.MUTED,
        )
        axes.set_xlabel("false-positive rate")
        axes.set_ylabel("true-positive rate, at most")
        tips = [
            Tip(rate, bound, f"FPR {100 * rate:.2g}%: TPR at most {percent_text(bound)}")
            for rate, bound in zip(rates, bounds, strict=True)
        ]
        label = "Bound on the true-positive rate of any attack, over its false-positive rate"
        return inline_svg(figure, name="attack", label=label, axes=axes, strips=tips)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    return figure, figure.add_subplot()


def _mark(axes: Axes, point: tuple[float, float]) -> None:
    if not math.isfinite(point[0]):
        return
    axes.plot(*point, marker="o", markersize=5, color=Ink.ACCENT)
    axes.annotate(
        f"ε = {epsilon_text(point[0])}\nδ = {delta_text(point[1])}",
        point,
        xytext=(-8, -6),
        textcoords="offset points",
        ha="right",
        va="top",
        fontweight="bold",
        color=Ink.TEXT,
    )


def _power(value: float) -> str:
    """Return a power of ten in plain text: matplotlib's own is markup, without our colours."""
    exponent = round(math.log10(value))
    digits = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1" if exponent == 0 else f"10{digits}"
