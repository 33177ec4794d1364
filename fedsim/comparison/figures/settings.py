"""The compared metric against a varied setting, a line with intervals for each of the others.

A line's variants differ in one setting alone. They are found in the settings themselves. So it does
not matter whether a grid, `one_at_a_time`, `--vary`, single variants or runs that exist gave the
values.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fedsim.comparison.differences import SettingsTable, setting_text
from fedsim.comparison.figures.picture import WIDE_INCHES, Picture, Tips, figure_name, metric_axis
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import CONFIDENCE
from fedsim.comparison.text import guarantee_text, interval_text, metric_words
from fedsim.comparison.variants import axis_labels
from fedsim.core.formatting import epsilon_text, metric_text
from fedsim.core.metrics import metric_entry
from fedsim.report.line_plot import name_lines
from fedsim.report.svg import Ink

_ON_OTHER_AXIS = ("privacy.target_epsilon",)  # ε itself: the figure against ε shows it
_UNTOLD = ("given", "–")  # of a section, and of a key of a section that is null
_LEAST_CATEGORIES = 3  # of values that are no numbers
_LEAST_RATIO = 4.0  # of the largest to the smallest value of a logarithmic axis


@dataclass(frozen=True)
class SweepLine:
    """Variants that differ in one setting alone.

    Attributes:
        name: the other settings, where they differ from those of another line; else "".
        points: pairs (value of the setting, variant), in the order of the values.
    """

    name: str
    points: tuple[tuple[object, VariantResult], ...]


@dataclass(frozen=True)
class Sweep:
    """All variants that show the effect of one setting.

    Attributes:
        key: the setting, such as `local.optimizer.lr`.
        values: all values on the lines: ascending numbers, or others in the order of the variants.
        lines: at least one.
    """

    key: str
    values: tuple[object, ...]
    lines: tuple[SweepLine, ...]

    @property
    def numbers(self) -> tuple[float, ...] | None:
        """The values as numbers; None where one is no number."""
        found = [number_of(value) for value in self.values]
        return None if None in found else tuple(one for one in found if one is not None)

    @property
    def is_geometric(self) -> bool:
        """Whether the ratios of the values are more alike than their differences."""
        numbers = self.numbers
        return numbers is not None and is_geometric(numbers)

    def places(self) -> dict[str, float]:
        """Return the place of each value on the axis, by its text."""
        numbers = self.numbers
        if numbers is None:
            numbers = tuple(map(float, range(len(self.values))))
        return {value_text(value): place for value, place in zip(self.values, numbers, strict=True)}


def find_sweeps(results: Results) -> tuple[Sweep, ...]:
    """Return a sweep for each setting that some variants alone differ in.

    A setting with values that are no numbers needs three of them.

    Args:
        results: the variants of one unit.
    """
    variants = {one.name: one for one in results.variants if results.metric in one.metrics}
    table = results.settings.among(variants)
    return tuple(
        sweep
        for key in table.keys
        if key not in _ON_OTHER_AXIS
        for sweep in _sweep_of(key, table, variants)
    )


def number_of(value: object) -> float | None:
    """Return a number, or the only number of a list; None for any other value."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def value_text(value: object) -> str:
    """Return a value of a setting as text: equal numbers have equal texts."""
    number = number_of(value)
    return setting_text(value) if number is None else f"{number:.12g}"


def is_geometric(numbers: Sequence[float]) -> bool:
    """Return whether ascending numbers are spaced by ratios rather than by differences."""
    if len(numbers) < 3 or numbers[0] <= 0 or numbers[-1] < _LEAST_RATIO * numbers[0]:
        return False
    return _spread([math.log(one) for one in numbers]) < _spread(numbers)


def _spread(numbers: Sequence[float]) -> float:
    """Return the largest gap of ascending numbers over the smallest."""
    gaps = [high - low for low, high in pairwise(numbers)]
    return max(gaps) / min(gaps)


def _words(key: str, text: str) -> str:
    """Return one of the other settings of a line."""
    if (key, text) == ("privacy", "null"):
        return "no privacy"
    return f"{key.rpartition('.')[2]}={text}"


def _text(table: SettingsTable, name: str, key: str) -> str:
    """Return a variant's value of a key, equal for equal numbers."""
    own = table.values[name]
    return value_text(own[key]) if key in own else table.text(name, key)


def _sweep_of(
    key: str, table: SettingsTable, variants: Mapping[str, VariantResult]
) -> Iterator[Sweep]:
    """Yield the sweep of a key, if there is one."""
    others = [other for other in table.keys if other != key]
    groups: dict[tuple[str, ...], dict[str, tuple[object, VariantResult]]] = {}
    for name, variant in variants.items():
        if key not in table.values[name]:
            continue
        value = table.values[name][key]
        rest = tuple(_text(table, name, other) for other in others)
        groups.setdefault(rest, {}).setdefault(value_text(value), (value, variant))
    lines = {rest: list(points.values()) for rest, points in groups.items() if len(points) > 1}
    values = list({value_text(v): v for points in lines.values() for v, _ in points}.values())
    if not lines:
        return
    if all(number_of(value) is not None for value in values):
        values.sort(key=lambda value: number_of(value) or 0.0)
    elif len(values) < _LEAST_CATEGORIES:
        return
    order = [value_text(value) for value in values]
    differing = [i for i in range(len(others)) if len({rest[i] for rest in lines}) > 1]
    yield Sweep(
        key,
        tuple(values),
        tuple(
            SweepLine(
                ", ".join(_words(others[i], rest[i]) for i in differing if rest[i] not in _UNTOLD),
                tuple(sorted(points, key=lambda point: order.index(value_text(point[0])))),
            )
            for rest, points in lines.items()
        ),
    )


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
    least, most = metric_entry(results.metric).bounds
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
    least, most = metric_entry(metric).bounds
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
