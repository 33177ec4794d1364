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

from fedsim.comparison.differences import SettingsTable, setting_text
from fedsim.comparison.figures.picture import Picture, ends_of, figure_name, metric_axis
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import CONFIDENCE
from fedsim.comparison.text import guarantee_text, interval_text, metric_words
from fedsim.comparison.variants import axis_labels
from fedsim.core.formatting import epsilon_text, metric_text
from fedsim.report.chart import (
    SERIES,
    Axis,
    Chart,
    Dots,
    Ink,
    Line,
    Mark,
    Note,
    Point,
    interval,
    level,
    names,
    room_around,
    shortened,
    width_of,
)

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


_MAX_MARKS = 9
_MAX_NAME_CHARACTERS = 24
_MAX_LEVELS = 2
_SHARE_BEYOND = 0.03  # of the range of the metric, below all intervals: for the ε of points
_SHARE_APART = 0.012  # of the axis between two lines: intervals at one value stand side by side
_LEAST_SPREAD = 0.1  # of the ε of a line, for the ε of each point to be written


def against_settings(results: Results) -> tuple[Picture, ...]:
    """Return a figure for each setting that some variants alone differ in.

    Args:
        results: the variants of one unit.
    """
    sweeps = find_sweeps(results)
    labels = axis_labels([tuple(sweep.key.split(".")) for sweep in sweeps])
    shown = [one for sweep in sweeps for line in sweep.lines for _, one in line.points]
    shown += [one for sweep in sweeps for one in _levels(results, sweep)]
    y = _metric_axis(results.metric, shown)
    return tuple(
        _picture(results, sweep, label, y) for sweep, label in zip(sweeps, labels, strict=True)
    )


def _metric_axis(metric: str, shown: Sequence[VariantResult]) -> Axis:
    """Return the axis of the metric, the same in all figures."""
    estimates = [one.metrics[metric] for one in shown]
    values = [end for one in estimates for end in (*(ends_of(metric, one) or ()), one.mean)]
    below = [min(values) - _SHARE_BEYOND * (max(values) - min(values))] if values else []
    return metric_axis(metric, [*values, *below], metric_words(metric))


def _picture(results: Results, sweep: Sweep, label: str, y: Axis) -> Picture:
    metric, lines = results.metric, sweep.lines[: len(SERIES)]
    x, marks, ends = _value_axis(sweep), list[Mark](), list[tuple[str, Point, Ink]]()
    for index, line in enumerate(lines):
        points = _points(sweep, line, metric, _SHARE_APART * (index - (len(lines) - 1) / 2))
        marks += _line(points, sweep, line, results, SERIES[index])
        ends.append((shortened(line.name, _MAX_NAME_CHARACTERS), points[-1], SERIES[index]))
    for one in _levels(results, sweep):
        marks += _level(one, metric)
    if len(lines) == 1:
        ends = []
        marks += _epsilons(sweep, lines[0])
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
        chart=Chart(
            label=f"{metric_words(metric)} against {sweep.key}{intervals}: {words}",
            x=x,
            y=y,
            marks=[*marks, *names(ends, y, Chart.height)],
            aside=width_of(name for name, _, _ in ends),
        ),
        columns=("key", "line", "value", "variant", "epsilon", "n", "mean", "low", "high"),
        rows=[row for line in sweep.lines for row in _rows(sweep, line, metric)],
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


def _value_axis(sweep: Sweep) -> Axis:
    """Return an axis with the values; values with equal ratios stand at equal distances."""
    places, geometric = sweep.places(), sweep.is_geometric
    ends = room_around(list(places.values()), logarithmic=geometric)
    shown = list(places.items())[:: -(-len(places) // _MAX_MARKS)]
    marks = {place: shortened(text, _MAX_NAME_CHARACTERS) for text, place in shown}
    return Axis(*ends, marks, sweep.key, logarithmic=geometric)


def _points(sweep: Sweep, line: SweepLine, metric: str, shift: float) -> list[Point]:
    """Return the points of a line, shifted to the right by a share of the axis."""
    places, found = sweep.places(), list[Point]()
    low, high = min(places.values()), max(places.values())
    for value, variant in line.points:
        place = places[value_text(value)]
        place = (
            place * (high / low) ** shift if sweep.is_geometric else place + (high - low) * shift
        )
        found.append((place, variant.metrics[metric].mean))
    return found


def _line(
    points: Sequence[Point], sweep: Sweep, line: SweepLine, results: Results, ink: Ink
) -> Iterator[Mark]:
    """Yield a line with its intervals, the baseline in a ring."""
    if sweep.numbers is not None:
        yield Line(points, ink)
    tips = []
    for point, (value, variant) in zip(points, line.points, strict=True):
        one = variant.metrics[results.metric]
        ends = ends_of(results.metric, one)
        if ends is not None:
            yield from interval(point[0], ends, ink)
        if variant.name == results.baseline:
            yield Dots([point], ink, radius=6.0, hollow=True)
        guarantee = guarantee_text(variant) if variant.is_private else "no privacy"
        words = f"{value_text(value)}: {interval_text(results.metric, one)}, {guarantee}"
        tips.append(f"{sweep.key}: {words}")
    yield Dots(points, ink, radius=3.0, tips=tips)


def _level(variant: VariantResult, metric: str) -> Iterator[Mark]:
    mean, edge = variant.metrics[metric].mean, math.inf
    tip = f"{variant.name}: {interval_text(metric, variant.metrics[metric])}, no privacy"
    yield level(mean, width=1.2, tip=tip)
    words = f"{shortened(variant.name, _MAX_NAME_CHARACTERS)} {metric_text(metric, mean)}"
    yield Note(words, (edge, mean), (0, -8), "muted", "end")


def _epsilons(sweep: Sweep, line: SweepLine) -> Iterator[Note]:
    """Yield the ε of each point below the line, where the setting changes it."""
    known = [one.epsilon for _, one in line.points if one.epsilon]
    if len(known) < 2 or min(known) >= (1 - _LEAST_SPREAD) * max(known):
        return
    places = sweep.places()
    for value, one in line.points:
        if one.epsilon is not None:
            words = f"ε {float(epsilon_text(one.epsilon)):.3g}"
            place = (places[value_text(value)], -math.inf)
            yield Note(words, place, (0, -8), "muted", "middle", 9.5)
