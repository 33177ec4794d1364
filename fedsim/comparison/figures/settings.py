"""The compared metric against a varied setting, a line with intervals for each of the others."""

import re
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fedsim.comparison.figures.axes import metric_axis, metric_bounds
from fedsim.comparison.figures.picture import WIDE_INCHES, Picture, Tips, figure_name
from fedsim.comparison.figures.sweeps import Sweep, SweepLine, find_sweeps, value_text
from fedsim.comparison.file.variants import axis_labels
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import CONFIDENCE
from fedsim.comparison.text import guarantee_text, interval_text, metric_words
from fedsim.core.formatting import epsilon_text, metric_text
from fedsim.report.line_names import name_lines
from fedsim.report.svg import Ink

_MAX_LINES = len(Ink.SERIES)
_MAX_TICKS = 9
_MAX_NAME_CHARACTERS = 24
_MAX_LEVELS = 2
_SHARE_BEYOND = 0.08  # of the range of the metric, above and below
_SHARE_APART = 0.012  # of the axis between two lines: intervals at one value stand side by side
_LEAST_SPREAD = 0.1  # of the ε of a line, for the ε of each point to be written


def against_settings(results: Results) -> tuple[Picture, ...]:
    """Return a figure for each setting that some variants alone differ in.

    Args:
        results: the variants of one unit.
    """
    sweeps = find_sweeps(results)
    labels = axis_labels([tuple(sweep.key.split(".")) for sweep in sweeps])
    limits = _limits(results, sweeps)
    return tuple(
        _picture(results, sweep, label, limits) for sweep, label in zip(sweeps, labels, strict=True)
    )


def _limits(results: Results, sweeps: Sequence[Sweep]) -> tuple[float, float]:
    """Return the ends of the metric's axis, the same in all figures."""
    drawn = [one for sweep in sweeps for line in sweep.lines for _, one in line.points]
    levels = [one for sweep in sweeps for one in _levels(results, sweep)]
    means = [one.metrics[results.metric].mean for one in (*drawn, *levels)]
    ends = [
        end
        for one in drawn
        for end in (one.metrics[results.metric].low, one.metrics[results.metric].high)
        if end is not None
    ]
    least, most = metric_bounds(results.metric)
    known = [min(max(end, least), most) for end in (*means, *ends)] or [0.0, 1.0]
    margin = _SHARE_BEYOND * (max(known) - min(known))
    return min(known) - margin, max(known) + margin


def _picture(results: Results, sweep: Sweep, label: str, limits: tuple[float, float]) -> Picture:
    metric, lines = results.metric, sweep.lines[:_MAX_LINES]
    levels = _levels(results, sweep)

    def paint(axes: Axes, tips: Tips) -> None:
        ends = []
        for index, line in enumerate(lines):
            colour, shift = Ink.SERIES[index], _SHARE_APART * (index - (len(lines) - 1) / 2)
            points = _points(sweep, line, metric, shift)
            _draw_line(axes, points, sweep, metric, colour, tips, baseline=results.baseline)
            ends.append((_short(line.name), points[-1][:2], colour))
        for variant in levels:
            _draw_level(axes, variant, metric, tips)
        _value_axis(axes, sweep)
        axes.set_xlabel(sweep.key)
        axes.set_ylabel(metric_words(metric))
        axes.set_ylim(limits)
        metric_axis(axes, metric)
        if len(lines) == 1:
            _write_epsilons(axes, sweep, lines[0])
        else:
            name_lines(axes, ends)

    words = "; ".join(
        f"{value_text(value)}: {interval_text(metric, one.metrics[metric])}"
        for line in lines
        for value, one in line.points
    )
    several = any(one.metrics[metric].n > 1 for line in lines for _, one in line.points)
    intervals = f", with {CONFIDENCE:.0%} intervals" if several else ""
    left_out = len(sweep.lines) - len(lines)
    missing = f" ({left_out} more lines in the CSV file)" if left_out else ""
    return Picture(
        name=figure_name(results, f"against-{re.sub(r'[^A-Za-z0-9_-]+', '-', label)}"),
        caption=f"{metric_words(metric).capitalize()} against {label}{intervals}{missing}",
        label=f"{metric_words(metric)} against {sweep.key}{intervals}: {words}",
        inches=WIDE_INCHES,
        columns=("key", "line", "value", "variant", "epsilon", "n", "mean", "low", "high"),
        rows=[row for line in sweep.lines for row in _rows(sweep, line, metric)],
        paint=paint,
        series={},  # lines have their names beside them
    )


def _rows(sweep: Sweep, line: SweepLine, metric: str) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for value, variant in line.points:
        one = variant.metrics[metric]
        facts = (sweep.key, line.name, value_text(value), variant.name, variant.epsilon)
        rows.append((*facts, one.n, one.mean, one.low, one.high))
    return rows


def _levels(results: Results, sweep: Sweep) -> list[VariantResult]:
    """Return few variants without privacy beside lines with privacy: they have no place on them."""
    drawn = [one for line in sweep.lines for _, one in line.points]
    names = {one.name for one in drawn}
    without = [
        one
        for one in results.variants
        if not one.is_private and one.name not in names and results.metric in one.metrics
    ]
    is_private = all(one.is_private for one in drawn)
    return without if is_private and len(without) <= _MAX_LEVELS else []


_Point = tuple[float, float, str, VariantResult]  # place, mean, value of the setting


def _points(sweep: Sweep, line: SweepLine, metric: str, shift: float) -> list[_Point]:
    """Return the points of a line, shifted to the right by a share of the axis."""
    places = sweep.places()
    low, high = min(places.values()), max(places.values())
    found: list[_Point] = []
    for value, variant in line.points:
        text = value_text(value)
        place = places[text]
        if sweep.is_geometric:
            place *= (high / low) ** shift
        else:
            place += (high - low) * shift
        found.append((place, variant.metrics[metric].mean, text, variant))
    return found


def _draw_line(
    axes: Axes,
    points: Sequence[_Point],
    sweep: Sweep,
    metric: str,
    colour: str,
    tips: Tips,
    *,
    baseline: object,
) -> None:
    """Draw a line with its intervals, the baseline in a ring."""
    least, most = metric_bounds(metric)
    is_path = sweep.numbers is not None
    xs, means = [point[0] for point in points], [point[1] for point in points]
    axes.plot(xs, means, color=colour, ls="-" if is_path else "none")
    for x, mean, text, variant in points:
        one = variant.metrics[metric]
        if one.low is not None and one.high is not None:
            ends = max(one.low, least), min(one.high, most)
            axes.plot([x, x], ends, color=colour, lw=1.4)
            for end in ends:
                axes.plot(x, end, marker="_", ms=7, color=colour)
        if variant.name == baseline:
            axes.plot(x, mean, marker="o", ms=12, mfc="none", mec=colour, mew=1.2)
        guarantee = guarantee_text(variant) if variant.is_private else "no privacy"
        tip = f"{sweep.key}: {text}: {interval_text(metric, one)}, {guarantee}"
        axes.plot(x, mean, marker="o", ms=6, color=colour, gid=tips.add(tip))


def _draw_level(axes: Axes, variant: VariantResult, metric: str, tips: Tips) -> None:
    mean = variant.metrics[metric].mean
    gid = tips.add(f"{variant.name}: {interval_text(metric, variant.metrics[metric])}, no privacy")
    axes.axhline(mean, color=Ink.MUTED, lw=1.2, ls=(0, (5, 3)), gid=gid)
    axes.annotate(
        f"{_short(variant.name)} {metric_text(metric, mean)}",
        (1, mean),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=Ink.MUTED,
    )


def _value_axis(axes: Axes, sweep: Sweep) -> None:
    """Mark the values; values with equal ratios stand at equal distances."""
    places = sweep.places()
    if sweep.is_geometric:
        axes.set_xscale("log")
    axes.margins(x=0.08)
    shown = list(places.items())
    stride = -(-len(shown) // _MAX_TICKS)
    names = {place: _short(text) for text, place in shown[::stride]}
    axes.xaxis.set_major_locator(FixedLocator(list(names)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: names.get(tick, "")))


def _write_epsilons(axes: Axes, sweep: Sweep, line: SweepLine) -> None:
    """Write the ε of each point below the line, where the setting changes it."""
    epsilons: Sequence[float | None] = [one.epsilon for _, one in line.points]
    known = [epsilon for epsilon in epsilons if epsilon]
    if len(known) < 2 or min(known) >= (1 - _LEAST_SPREAD) * max(known):
        return
    places: Mapping[str, float] = sweep.places()
    for (value, _), epsilon in zip(line.points, epsilons, strict=True):
        if epsilon is None:
            continue
        axes.annotate(
            f"ε {float(epsilon_text(epsilon)):.3g}",
            (places[value_text(value)], 0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize="x-small",
            color=Ink.MUTED,
        )


def _short(name: str) -> str:
    limit = _MAX_NAME_CHARACTERS
    return name if len(name) <= limit else f"{name[: limit - 1]}…"
