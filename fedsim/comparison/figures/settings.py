"""Figures of the compared metric against a varied setting.

A line connects variants that differ only in this setting; if other settings vary too, there are
several lines. Lines are found from the variants' settings alone, so it does not matter how the
variants were defined.
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
    capital,
    estimate,
    figure_name,
    metric_axis,
    numbers_of,
    values_of,
)
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import CONFIDENCE
from fedsim.comparison.text import guarantee_text, mean_text, metric_words
from fedsim.comparison.variants import axis_labels
from fedsim.core.formatting import epsilon_text, metric_text, shortened
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
)

_ON_OTHER_AXIS = "privacy.target_epsilon"  # ε itself: the figure against ε shows it
_WITHOUT = ("privacy", "null")
_UNTOLD = ("given", "–")  # of a section, and of a key of a section that is null
_LEAST_CATEGORIES = 3  # of values that are no numbers
_LEAST_RATIO = 4.0  # of the largest to the smallest value of a logarithmic axis

# Variants that differ only in one setting, as pairs (text of its value, variant) in order.
Points = tuple[tuple[str, VariantResult], ...]


@dataclass(frozen=True)
class Sweep:
    """One figure of the compared metric over the values of one setting, with one or more lines.

    A line's name has the settings in which it differs from the other lines; "" of the only line.
    `places` has the position of each value on the x axis, by its text: the value itself if all are
    numbers, else 0, 1, 2, ... in the order of the variants.
    """

    key: str
    places: Mapping[str, float]
    is_numeric: bool
    lines: tuple[tuple[str, Points], ...]  # (name, points)


def find_sweeps(results: Results) -> tuple[Sweep, ...]:
    """Return a figure (`Sweep`) for each setting that is the only difference of some variants.

    If the setting's values are not numbers, at least three different values are needed.
    """
    variants = {v.name: v for v in results.variants if results.metric in v.metrics}
    table = results.settings.among(variants)
    keys = (key for key in table.keys if key != _ON_OTHER_AXIS)
    return tuple(sweep for key in keys for sweep in _sweep_of(key, table, variants))


def number_of(value: object) -> float | None:
    """Return as a float a finite number, or the only number in a list; None for other values."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def value_text(value: object) -> str:
    """Return a setting's value as text; equal numbers such as 1 and 1.0 give the same text."""
    number = number_of(value)
    return setting_text(value) if number is None else f"{number:.12g}"


def is_geometric(numbers: Sequence[float]) -> bool:
    """Whether ascending numbers are closer to a geometric sequence than to an arithmetic one."""
    if len(numbers) < 3 or numbers[0] <= 0 or numbers[-1] < _LEAST_RATIO * numbers[0]:
        return False
    return _spread([math.log(value) for value in numbers]) < _spread(numbers)


def _spread(numbers: Sequence[float]) -> float:
    """Return the largest gap between ascending numbers over the smallest gap."""
    gaps = [high - low for low, high in pairwise(numbers)]
    return max(gaps) / min(gaps)


def _text(table: SettingsTable, name: str, key: str) -> str:
    """Return the text of a variant's value of a key, the same for equal numbers."""
    values = table.values[name]
    return value_text(values[key]) if key in values else table.texts[name][key]


def _sweep_of(
    key: str, table: SettingsTable, variants: Mapping[str, VariantResult]
) -> Iterator[Sweep]:
    """Yield the sweep of a key, or nothing if no variants differ only in it."""
    others = [other for other in table.keys if other != key]
    groups: dict[tuple[tuple[str, str], ...], dict[str, VariantResult]] = {}
    numbers: dict[str, float | None] = {}
    for name, variant in variants.items():
        if key in table.values[name]:
            value = table.values[name][key]
            rest = tuple((other, _text(table, name, other)) for other in others)
            groups.setdefault(rest, {}).setdefault(value_text(value), variant)
            numbers[value_text(value)] = number_of(value)
    lines = {rest: points for rest, points in groups.items() if len(points) > 1}
    texts = list(dict.fromkeys(text for points in lines.values() for text in points))
    known = sorted((number, text) for text in texts if (number := numbers[text]) is not None)
    is_numeric = len(known) == len(texts)
    if not lines or not (is_numeric or len(texts) >= _LEAST_CATEGORIES):
        return
    places = {text: float(place) for place, text in (known if is_numeric else enumerate(texts))}
    shared = set.intersection(*(set(rest) for rest in lines))
    named: list[tuple[str, Points]] = []
    for rest, points in lines.items():
        words = (
            "no privacy" if (other, text) == _WITHOUT else f"{other.rpartition('.')[2]}={text}"
            for other, text in rest
            if (other, text) not in shared and text not in _UNTOLD
        )
        ordered = tuple((text, points[text]) for text in places if text in points)
        named.append((", ".join(words), ordered))
    yield Sweep(key, places, is_numeric, tuple(named))


_MAX_MARKS = 9
_MAX_CHARACTERS = 24  # of a name
_MAX_LEVELS = 2
_SHARE_BELOW = 0.03  # of the range of the metric, below all intervals: for the ε of points
_SHARE_APART = 0.012  # of the axis between two lines: intervals at one value stand side by side
_LEAST_SPREAD = 0.1  # of the ε of a line, for the ε of each point to be written


def against_settings(results: Results) -> tuple[Picture, ...]:
    """Return a figure for each setting that is the only difference between some variants."""
    metric, sweeps = results.metric, find_sweeps(results)
    labels = axis_labels([tuple(sweep.key.split(".")) for sweep in sweeps])
    shown = [variant for sweep in sweeps for _, points in sweep.lines for _, variant in points]
    shown += [variant for sweep in sweeps for variant in _levels(results, sweep)]
    values = values_of(metric, [variant.metrics[metric] for variant in shown]) or [0.0]
    below = min(values) - _SHARE_BELOW * (max(values) - min(values))
    y = metric_axis(metric, [below, *values], metric_words(metric))
    return tuple(_picture(results, *pair, y) for pair in zip(sweeps, labels, strict=True))


def _picture(results: Results, sweep: Sweep, label: str, y: Axis) -> Picture:
    metric, words, lines = results.metric, y.label, sweep.lines[: len(SERIES)]
    marks, names, x = list[Mark](), list[tuple[str, Point, Ink]](), _value_axis(sweep)
    for number, ((name, line), ink) in enumerate(zip(lines, SERIES, strict=False)):
        shift = _SHARE_APART * (number - (len(lines) - 1) / 2)
        points = [(_place(sweep, value, x, shift), v.metrics[metric].mean) for value, v in line]
        marks += _line(results, sweep, line, points, ink)
        names.append((shortened(name, _MAX_CHARACTERS), points[-1], ink))
    for variant in _levels(results, sweep):
        marks += _level(results, variant)
    if len(lines) == 1:
        marks += _epsilons(sweep, lines[0][1])
    shown = [pair for _, line in lines for pair in line]
    texts = "; ".join(f"{value}: {mean_text(results, variant)}" for value, variant in shown)
    several = any(variant.metrics[metric].n > 1 for _, variant in shown)
    intervals = f", with {CONFIDENCE:.0%} intervals" if several else ""
    left_out = len(sweep.lines) - len(lines)
    missing = f" ({left_out} more lines in the CSV file)" if left_out else ""
    said = f"{words} against {sweep.key}{intervals}: {texts}"
    return Picture(
        figure_name(results, f"against-{re.sub(r'[^A-Za-z0-9_-]+', '-', label)}"),
        f"{capital(words)} against {label}{intervals}{missing}",
        Chart(said, x, y, marks, names=names if len(lines) > 1 else ()),
        ("key", "line", "value", "variant", "epsilon", *ESTIMATE),
        [
            (sweep.key, name, value, v.name, v.epsilon, *numbers_of(v.metrics[metric]))
            for name, line in sweep.lines
            for value, v in line
        ],
    )


def _levels(results: Results, sweep: Sweep) -> list[VariantResult]:
    """Return variants without privacy that are drawn as levels beside lines with privacy."""
    if not all(variant.is_private for _, line in sweep.lines for _, variant in line):
        return []
    without = [v for v in results.variants if not v.is_private and results.metric in v.metrics]
    return without if len(without) <= _MAX_LEVELS else []


def _value_axis(sweep: Sweep) -> Axis:
    """Return the axis of a setting's values; logarithmic if they are spaced by ratios."""
    values = list(sweep.places.values())
    geometric = sweep.is_numeric and is_geometric(values)
    ends = room_around(values, logarithmic=geometric)
    shown = list(sweep.places.items())[:: -(-len(sweep.places) // _MAX_MARKS)]
    marks = {place: shortened(text, _MAX_CHARACTERS) for text, place in shown}
    return Axis(*ends, marks, sweep.key, logarithmic=geometric)


def _place(sweep: Sweep, value: str, x: Axis, shift: float) -> float:
    """Return the axis position of a value, shifted right by `shift` times the axis length."""
    place, low, high = sweep.places[value], min(sweep.places.values()), max(sweep.places.values())
    return place * (high / low) ** shift if x.logarithmic else place + (high - low) * shift


def _line(
    results: Results, sweep: Sweep, line: Points, points: Sequence[Point], ink: Ink
) -> Iterator[Mark]:
    """Yield the marks of a line with its intervals; a ring marks the baseline."""
    metric, look = results.metric, Look(ink, symbol="o")
    if sweep.is_numeric:
        yield Line(points, ink)
    for point, (value, variant) in zip(points, line, strict=True):
        guarantee = guarantee_text(variant) if variant.is_private else "no privacy"
        tip = f"{sweep.key}: {value}: {mean_text(results, variant)}, {guarantee}"
        yield from estimate(variant, metric, point[0], look, tip)
        if variant.name == results.baseline:
            yield Dots([point], ink, radius=6.0, hollow=True)


def _level(results: Results, variant: VariantResult) -> Iterator[Mark]:
    """Yield a horizontal line at a variant's mean, with the variant's name at its end."""
    mean = variant.metrics[results.metric].mean
    yield level(mean, width=1.2, tip=f"{variant.name}: {mean_text(results, variant)}, no privacy")
    words = f"{shortened(variant.name, _MAX_CHARACTERS)} {metric_text(results.metric, mean)}"
    yield Note(words, (math.inf, mean), (0, -8), "muted", "end")


def _epsilons(sweep: Sweep, line: Points) -> Iterator[Note]:
    """Yield a note with ε below each point of a line, if the setting changes ε."""
    known = [(sweep.places[value], v.epsilon) for value, v in line if v.epsilon]
    epsilons = [epsilon for _, epsilon in known]
    if len(known) > 1 and min(epsilons) < (1 - _LEAST_SPREAD) * max(epsilons):
        for place, epsilon in known:
            words = f"ε {float(epsilon_text(epsilon)):.3g}"
            yield Note(words, (place, -math.inf), (0, -8), "muted", "middle", 9.5)
