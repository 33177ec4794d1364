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
from fedsim.comparison.figures import (
    ESTIMATE,
    Picture,
    estimate,
    figure_name,
    metric_axis,
    numbers_of,
    values_of,
)
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
    Look,
    Mark,
    Note,
    Point,
    level,
    room_around,
    shortened,
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
        points: pairs (text of the setting's value, variant), in the order of the values.
    """

    name: str
    points: tuple[tuple[str, VariantResult], ...]


@dataclass(frozen=True)
class Sweep:
    """All variants that show the effect of one setting.

    Attributes:
        key: the setting, such as `local.optimizer.lr`.
        places: the place on the axis of each value on the lines, by its text: ascending numbers, or
            0, 1, 2, ... in the order of the variants.
        is_numeric: whether the values are numbers.
        lines: at least one.
    """

    key: str
    places: Mapping[str, float]
    is_numeric: bool
    lines: tuple[SweepLine, ...]

    @property
    def is_geometric(self) -> bool:
        """Whether the ratios of the values are more alike than their differences."""
        return self.is_numeric and is_geometric(list(self.places.values()))


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
    groups: dict[tuple[str, ...], dict[str, VariantResult]] = {}
    numbers: dict[str, float | None] = {}
    for name, variant in variants.items():
        if key in table.values[name]:
            value = table.values[name][key]
            rest = tuple(_text(table, name, other) for other in others)
            groups.setdefault(rest, {}).setdefault(value_text(value), variant)
            numbers[value_text(value)] = number_of(value)
    lines = {rest: points for rest, points in groups.items() if len(points) > 1}
    texts = list(dict.fromkeys(text for points in lines.values() for text in points))
    known = sorted((number, text) for text in texts if (number := numbers[text]) is not None)
    is_numeric = len(known) == len(texts)
    if not lines or not (is_numeric or len(texts) >= _LEAST_CATEGORIES):
        return
    places = {text: float(place) for place, text in (known if is_numeric else enumerate(texts))}
    differing = [i for i in range(len(others)) if len({rest[i] for rest in lines}) > 1]
    yield Sweep(
        key,
        places,
        is_numeric,
        tuple(
            SweepLine(
                ", ".join(_words(others[i], rest[i]) for i in differing if rest[i] not in _UNTOLD),
                tuple((text, points[text]) for text in places if text in points),
            )
            for rest, points in lines.items()
        ),
    )


_MAX_MARKS = 9
_MAX_CHARACTERS = 24  # of a name
_MAX_LEVELS = 2
_SHARE_BELOW = 0.03  # of the range of the metric, below all intervals: for the ε of points
_SHARE_APART = 0.012  # of the axis between two lines: intervals at one value stand side by side
_LEAST_SPREAD = 0.1  # of the ε of a line, for the ε of each point to be written


def against_settings(results: Results) -> tuple[Picture, ...]:
    """Return a figure for each setting that some variants alone differ in.

    Args:
        results: the variants of one unit.
    """
    metric, sweeps = results.metric, find_sweeps(results)
    labels = axis_labels([tuple(sweep.key.split(".")) for sweep in sweeps])
    shown = [one for sweep in sweeps for line in sweep.lines for _, one in line.points]
    shown += [one for sweep in sweeps for one in _levels(results, sweep)]
    values = values_of(metric, shown) or [0.0]
    below = min(values) - _SHARE_BELOW * (max(values) - min(values))
    y = metric_axis(metric, [below, *values], metric_words(metric))
    return tuple(
        _picture(results, sweep, label, y) for sweep, label in zip(sweeps, labels, strict=True)
    )


def _picture(results: Results, sweep: Sweep, label: str, y: Axis) -> Picture:
    metric, words, lines = results.metric, y.label, sweep.lines[: len(SERIES)]
    marks, names, x = list[Mark](), list[tuple[str, Point, Ink]](), _value_axis(sweep)
    for number, line in enumerate(lines):
        shift = _SHARE_APART * (number - (len(lines) - 1) / 2)
        points = [(_place(sweep, one, shift), own.metrics[metric].mean) for one, own in line.points]
        marks += _line(results, sweep, line, points, SERIES[number])
        names.append((shortened(line.name, _MAX_CHARACTERS), points[-1], SERIES[number]))
    for one in _levels(results, sweep):
        marks += _level(one, metric)
    if len(lines) == 1:
        marks += _epsilons(sweep, lines[0])
    shown = [point for line in lines for point in line.points]
    texts = [f"{value}: {interval_text(metric, one.metrics[metric])}" for value, one in shown]
    several = any(one.metrics[metric].n > 1 for _, one in shown)
    intervals = f", with {CONFIDENCE:.0%} intervals" if several else ""
    left_out = len(sweep.lines) - len(lines)
    missing = f" ({left_out} more lines in the CSV file)" if left_out else ""
    said = f"{words} against {sweep.key}{intervals}: {'; '.join(texts)}"
    return Picture(
        figure_name(results, f"against-{re.sub(r'[^A-Za-z0-9_-]+', '-', label)}"),
        f"{words.capitalize()} against {label}{intervals}{missing}",
        Chart(said, x, y, marks, names=names if len(lines) > 1 else ()),
        ("key", "line", "value", "variant", "epsilon", *ESTIMATE),
        [
            (sweep.key, line.name, value, one.name, one.epsilon, *numbers_of(metric, one))
            for line in sweep.lines
            for value, one in line.points
        ],
    )


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
    geometric = sweep.is_geometric
    ends = room_around(list(sweep.places.values()), logarithmic=geometric)
    shown = list(sweep.places.items())[:: -(-len(sweep.places) // _MAX_MARKS)]
    marks = {place: shortened(text, _MAX_CHARACTERS) for text, place in shown}
    return Axis(*ends, marks, sweep.key, logarithmic=geometric)


def _place(sweep: Sweep, value: str, shift: float) -> float:
    """Return the place of a value, shifted to the right by a share of the axis."""
    place, low, high = sweep.places[value], min(sweep.places.values()), max(sweep.places.values())
    return place * (high / low) ** shift if sweep.is_geometric else place + (high - low) * shift


def _line(
    results: Results, sweep: Sweep, line: SweepLine, points: Sequence[Point], ink: Ink
) -> Iterator[Mark]:
    """Yield a line with its intervals, the baseline in a ring."""
    metric, look = results.metric, Look(ink, symbol="o")
    if sweep.is_numeric:
        yield Line(points, ink)
    for point, (value, one) in zip(points, line.points, strict=True):
        guarantee = guarantee_text(one) if one.is_private else "no privacy"
        text = interval_text(metric, one.metrics[metric])
        tip = f"{sweep.key}: {value}: {text}, {guarantee}"
        yield from estimate(one, metric, point[0], look, tip)
        if one.name == results.baseline:
            yield Dots([point], ink, radius=6.0, hollow=True)


def _level(variant: VariantResult, metric: str) -> Iterator[Mark]:
    """Yield a line across for a variant, its name above the end."""
    mean, text = variant.metrics[metric].mean, interval_text(metric, variant.metrics[metric])
    yield level(mean, width=1.2, tip=f"{variant.name}: {text}, no privacy")
    words = f"{shortened(variant.name, _MAX_CHARACTERS)} {metric_text(metric, mean)}"
    yield Note(words, (math.inf, mean), (0, -8), "muted", "end")


def _epsilons(sweep: Sweep, line: SweepLine) -> Iterator[Note]:
    """Yield the ε of each point below the line, where the setting changes it."""
    known = [(sweep.places[value], one.epsilon) for value, one in line.points if one.epsilon]
    epsilons = [epsilon for _, epsilon in known]
    if len(known) > 1 and min(epsilons) < (1 - _LEAST_SPREAD) * max(epsilons):
        for place, epsilon in known:
            words = f"ε {float(epsilon_text(epsilon)):.3g}"
            yield Note(words, (place, -math.inf), (0, -8), "muted", "middle", 9.5)
