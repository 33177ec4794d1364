"""Variants that differ in one setting alone: the lines of a figure against that setting.

They are found in the settings themselves. So it does not matter whether a grid, `one_at_a_time`,
`--vary`, single variants or runs that exist gave the values.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedsim.comparison.differences import SettingsTable, setting_text
from fedsim.comparison.results import Results, VariantResult

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
