"""The figures of the report. The only module that imports matplotlib, so import it when drawing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

from fedsim.report.client_table import MAX_BARS, aligned_epsilon
from fedsim.report.svg import Ink, Tip, inline_svg, style

# In pixels at 72 to the inch, about as wide as a phone: text keeps its size there.
_CURVE_SIZE_INCHES = (310 / 72, 225 / 72)
_WIDTH_PIXELS = 400
_BAR_HEIGHT_PIXELS = 21

# More points than pixels would only make the file larger.
_MAX_POINTS = 400
_MAX_TIPS = 100

_SAME_SHARE = 0.99  # of the largest ε: bars of such lengths look the same

_FEW_DECADES = (1.0, 2.0, 5.0)  # ticks of each decade, where there are not many

_Point = TypeVar("_Point")


@dataclass(frozen=True)
class Axis:
    """What a curve is drawn over.

    Attributes:
        label: what it is, below the axis.
        values: places of the points, ascending.
        text: a place in words.
        whole: whether only whole numbers are marked.
    """

    label: str
    values: Sequence[float]
    text: Callable[[float], str]
    whole: bool = False


def round_axis(rounds: Sequence[int]) -> Axis:
    """Return the axis of round numbers."""
    return Axis("round", rounds, lambda number: f"round {number:,.0f}", whole=True)


@dataclass(frozen=True)
class Curve:
    """A quantity over the rounds, or over what grows with them.

    Attributes:
        name: unique in the page, such as `accuracy`.
        label: what it is, in words.
        over: the horizontal axis.
        values: one for each place; None where it was not finite.
        text: how the last value is written beside its point.
        percent: whether the axis is labelled in percent, and ends at 100 %.
        target: a horizontal line to compare with.
        target_text: what the line is; None: its value.
        from_zero: whether the axis starts at 0.
        logarithmic: whether equal distances are equal ratios.
    """

    name: str
    label: str
    over: Axis
    values: Sequence[float | None]
    text: Callable[[float], str]
    percent: bool = False
    target: float | None = None
    target_text: str | None = None
    from_zero: bool = False
    logarithmic: bool = False


def draw_curve(curve: Curve) -> Markup | None:
    """Return the curve as inline SVG; None where no value is finite."""
    points = [
        (number, math.nan if value is None else value)
        for number, value in _thinned(list(zip(curve.over.values, curve.values, strict=True)))
    ]
    finite = [(number, value) for number, value in points if math.isfinite(value)]
    if not finite:
        return None
    with style():
        figure, axes = _new_figure(*_CURVE_SIZE_INCHES)
        marker = {"marker": "o", "markersize": 4} if len(finite) == 1 else {}
        axes.plot(*zip(*points, strict=True), color=Ink.ACCENT, **marker)
        # A target line runs through the label of a spend that reached it: write below the line.
        drop = 0 if curve.target is None else -9
        _mark_last(axes, finite[-1], curve.text, drop)
        _bottom_axis(axes, curve.over)
        if curve.logarithmic:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=_FEW_DECADES if high < 99 * low else (1,)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.minorticks_off()
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
        if curve.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_ylim(top=min(axes.get_ylim()[1], 1.0))
        if curve.target is not None:
            _target_line(axes, curve.target, curve.target_text, horizontal=True)
        if curve.from_zero:
            axes.set_ylim(0, _room_above(axes, curve.target))
        tips = [
            Tip(place, value, f"{curve.over.text(place)}: {curve.text(value)}")
            for place, value in finite
        ]
        return inline_svg(
            figure, name=curve.name, label=_spoken(curve, tips), axes=axes, strips=tips
        )


def _spoken(curve: Curve, tips: Sequence[Tip]) -> str:
    """Return a description for screen readers: the first and the last value."""
    ends = tips[-1].text if len(tips) == 1 else f"from {tips[0].text} to {tips[-1].text}"
    return f"{curve.label} over {curve.over.label}, {ends}"


@dataclass(frozen=True)
class Spend:
    """One client of the spend figure; an infinite ε is None."""

    client: int
    epsilon: float | None
    target: float | None


def draw_spend(spends: Sequence[Spend]) -> Markup:
    """Return every client's ε: a bar for each, or the sorted curve of more than `MAX_BARS`.

    ε that are all alike need no figure: `narrow_range` is enough.
    """
    with style():
        label = "Epsilon spent by each client; the table below has every number"
        if len(spends) <= MAX_BARS:
            figure, axes = _bars(spends)
            tips = [Tip(0, row, _spend_text(spend)) for row, spend in enumerate(spends)]
            return inline_svg(
                figure, name="spend", label=label, axes=axes, strips=tips, across=True
            )
        figure, axes, tips = _ranked(spends)
        return inline_svg(figure, name="spend", label=label, axes=axes, strips=tips)


def _spend_text(spend: Spend) -> str:
    target = "" if spend.target is None else f" of {spend.target:g}"
    return f"client {spend.client}: ε {aligned_epsilon(spend.epsilon)}{target}"


def narrow_range(spends: Sequence[Spend]) -> tuple[float, float] | None:
    """Return the smallest and largest ε of several clients within 1 %; None for a wider range."""
    found = [math.inf if spend.epsilon is None else spend.epsilon for spend in spends]
    if len(found) < 2 or not min(found) >= _SAME_SHARE * max(found):
        return None
    return (min(found), max(found))


def common_target(spends: Sequence[Spend]) -> float | None:
    """Return the target ε that all clients share; None if they do not."""
    targets = {spend.target for spend in spends}
    return targets.pop() if len(targets) == 1 else None


def _bars(spends: Sequence[Spend]) -> tuple[Figure, Axes]:
    figure, axes = _new_figure(_WIDTH_PIXELS / 72, (len(spends) * _BAR_HEIGHT_PIXELS + 66) / 72)
    finite = [spend.epsilon for spend in spends if spend.epsilon is not None]
    targets = [spend.target for spend in spends if spend.target is not None]
    longest = max([*finite, *targets, 1e-9])
    largest = aligned_epsilon(max(finite, default=0.0)) if len(finite) == len(spends) else None
    for row, spend in enumerate(spends):
        worst = aligned_epsilon(spend.epsilon) == largest
        length = longest if spend.epsilon is None else spend.epsilon
        axes.barh(row, length, height=0.62, color=Ink.ACCENT if worst else Ink.BAR)
        # In one column, beyond the longest bar, where no target line crosses them.
        axes.annotate(
            aligned_epsilon(spend.epsilon),
            (1, row),
            xycoords=axes.get_yaxis_transform(),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=Ink.TEXT,
            fontweight="bold" if worst else "normal",
        )
    _bar_targets(axes, spends)
    axes.set_yticks(range(len(spends)), [str(spend.client) for spend in spends])
    axes.set_ylim(len(spends) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.01)
    axes.set_xlabel("ε")
    axes.set_ylabel("client")
    axes.grid(False)
    return figure, axes


def _bar_targets(axes: Axes, spends: Sequence[Spend]) -> None:
    shared = common_target(spends)
    if shared is not None:
        _target_line(axes, shared, horizontal=False)
        return
    for row, spend in enumerate(spends):
        if spend.target is not None:
            axes.plot([spend.target] * 2, [row - 0.42, row + 0.42], color=Ink.TEXT, linewidth=1.4)


def _ranked(spends: Sequence[Spend]) -> tuple[Figure, Axes, list[Tip]]:
    """Draw all clients as one falling curve, without those of infinite ε."""
    known = [(s.epsilon, s) for s in spends if s.epsilon is not None]
    falling = [spend for _, spend in sorted(known, key=lambda pair: -pair[0])]
    epsilons = [spend.epsilon or 0.0 for spend in falling]
    figure, axes = _new_figure(_WIDTH_PIXELS / 72, 240 / 72)
    hidden = len(spends) - len(epsilons)
    shown = _thinned(list(enumerate(epsilons, start=hidden + 1)))
    if shown:
        ranks, values = zip(*shown, strict=True)
        axes.fill_between(ranks, values, color=Ink.BAR, step="mid", linewidth=0)
        axes.plot(ranks, values, color=Ink.ACCENT, drawstyle="steps-mid")
    shared = common_target(spends)
    if shared is not None:
        _target_line(axes, shared, horizontal=True)
    axes.set_xlim(0.5, len(spends) + 0.5)
    axes.set_ylim(0, _room_above(axes, shared))
    axes.set_xlabel("clients, by falling ε" + (f" ({hidden} with infinite ε)" if hidden else ""))
    axes.set_ylabel("ε")
    tips = [
        Tip(rank, value, f"{rank:,} of {len(spends):,}: {_spend_text(falling[rank - hidden - 1])}")
        for rank, value in shown[:: max(1, len(shown) // _MAX_TIPS)]
    ]
    return figure, axes, tips


def _new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    # Figure, not pyplot: pyplot keeps figures alive and has a state of its own.
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _bottom_axis(axes: Axes, over: Axis) -> None:
    axes.set_xlabel(over.label)
    first, last = over.values[0], over.values[-1]
    if over.whole and len(over.values) <= 5:
        axes.set_xticks(over.values)
    else:
        places = MaxNLocator(5, integer=over.whole).tick_values(first, last)
        axes.set_xticks([place for place in places if first <= place <= last])
    # Some room on the right for the label of the last value.
    span = max(last - first, 1) if over.whole else (last - first) or 1.0
    axes.set_xlim(first - 0.02 * span, last + 0.2 * span)


def _mark_last(
    axes: Axes, point: tuple[float, float], text: Callable[[float], str], drop: int
) -> None:
    axes.plot(*point, marker="o", markersize=4.5, color=Ink.ACCENT)
    axes.annotate(
        text(point[1]),
        point,
        xytext=(6, drop),
        textcoords="offset points",
        va="center",
        fontweight="bold",
        color=Ink.TEXT,
        annotation_clip=False,
    )


def _target_line(axes: Axes, target: float, words: str | None = None, *, horizontal: bool) -> None:
    text = f"target {target:g}" if words is None else words
    line = {"color": Ink.MUTED, "linewidth": 1.1, "linestyle": (0, (4, 3))}
    if horizontal:
        axes.axhline(target, **line)
        position, place, offset = (0, target), ("left", "bottom"), (4, 2)
        transform = axes.get_yaxis_transform()
    else:
        axes.axvline(target, **line)
        position, place, offset = (target, 1), ("center", "bottom"), (0, 2)
        transform = axes.get_xaxis_transform()
    axes.annotate(
        text,
        position,
        xycoords=transform,
        xytext=offset,
        textcoords="offset points",
        ha=place[0],
        va=place[1],
        color=Ink.MUTED,
    )


def _room_above(axes: Axes, target: float | None) -> float:
    top = axes.get_ylim()[1]
    return max(top, 1.15 * target) if target is not None else top


def _thinned(points: list[_Point]) -> list[_Point]:
    """Return at most about `_MAX_POINTS` points, evenly spread, the last one among them."""
    stride = -(-len(points) // _MAX_POINTS)
    return points[::-1][::stride][::-1] if stride > 1 else points
