"""The figures of the report, as inline SVG."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from fedsim.core.formatting import aligned_epsilon, delta_text, epsilon_text, percent_text
from fedsim.report.chart import Chart, Point, Scale, Tip, powers, room_around, ticks, width_of
from fedsim.report.client_table import MAX_BARS
from fedsim.statement import AttackBound, Profile

# In pixels at 72 to the inch, about as wide as a phone: text keeps its size there.
_CURVE_PIXELS = (310, 225)
_WIDTH_PIXELS = 400
_BAR_HEIGHT_PIXELS = 21

_PROFILE_WIDTH, _PROFILE_HEIGHT = 330, 235
_MIN_DELTA = 1e-300
_RATES = {1e-4: "0.01%", 1e-3: "0.1%", 1e-2: "1%", 1e-1: "10%", 1.0: "100%"}

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
        (place, math.nan if value is None else value)
        for place, value in _thinned(list(zip(curve.over.values, curve.values, strict=True)))
    ]
    finite = [(place, value) for place, value in points if math.isfinite(value)]
    if not finite:
        return None
    (width, height), last = _CURVE_PIXELS, curve.text(finite[-1][1])
    low, high = _range_of(curve, [value for _, value in finite])
    marks = {value: _axis_text(curve, value) for value in _marks(curve, low, high)}
    left, right = 9 + width_of(marks.values()), width - 14 - width_of([last])
    x = Scale(curve.over.values[0], curve.over.values[-1], left, right)
    y = Scale(low, high, height - 38, 12, curve.logarithmic)
    chart = Chart(width, height, x, y)
    chart.left_axis(marks)
    chart.bottom_axis(_places(curve.over), curve.over.label)
    if curve.target is not None:
        words = curve.target_text or f"target {curve.target:g}"
        chart.target(curve.target, words)
    chart.line(points)
    chart.dot(finite[-1])
    # A target line runs through the label of a spend that reached it: write below the line.
    chart.write(last, finite[-1], (6, 0 if curve.target is None else 9), bold=True)
    tips = [
        Tip(place, value, f"{curve.over.text(place)}: {curve.text(value)}")
        for place, value in finite
    ]
    return chart.svg(_spoken(curve, tips), tips)


def _range_of(curve: Curve, values: Sequence[float]) -> Point:
    """Return the ends of the vertical axis."""
    aim = [] if curve.target is None else [curve.target]
    low, high = room_around([*values, *aim], logarithmic=curve.logarithmic)
    if curve.from_zero:
        return 0.0, max([high, *(1.15 * target for target in aim)])
    return low, min(high, 1.0) if curve.percent else high


def _marks(curve: Curve, low: float, high: float) -> list[float]:
    if not curve.logarithmic:
        return ticks(low, high)
    return powers(low, high, _FEW_DECADES if high < 99 * low else (1,)) or ticks(low, high)


def _axis_text(curve: Curve, value: float) -> str:
    return f"{100 * value:.6g}%" if curve.percent else f"{value:,.6g}"


def _places(over: Axis) -> dict[float, str]:
    """Return the marks of a horizontal axis."""
    values = over.values
    few = over.whole and len(values) <= 5
    marked = values if few else ticks(values[0], values[-1], whole=over.whole)
    return {value: f"{value:,.6g}" for value in marked}


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
    draw = _bars if len(spends) <= MAX_BARS else _ranked
    return draw(spends, "Epsilon spent by each client; the table below has every number")


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


def _bars(spends: Sequence[Spend], label: str) -> Markup:
    finite = [spend.epsilon for spend in spends if spend.epsilon is not None]
    targets = [spend.target for spend in spends if spend.target is not None]
    longest = max([*finite, *targets, 1e-9])
    largest = aligned_epsilon(max(finite, default=0.0)) if len(finite) == len(spends) else None
    texts = [aligned_epsilon(spend.epsilon) for spend in spends]
    names = {float(row): str(spend.client) for row, spend in enumerate(spends)}
    right = _WIDTH_PIXELS - 14 - width_of(texts)
    x = Scale(0.0, longest, 29 + width_of(names.values()), right)
    y = Scale(-0.5, len(spends) - 0.5, 22, 22 + len(spends) * _BAR_HEIGHT_PIXELS)
    chart = Chart(_WIDTH_PIXELS, y.end + 38, x, y)
    chart.bottom_axis({value: f"{value:,.6g}" for value in ticks(0.0, longest)}, "ε")
    chart.left_axis(names, "client", grid=False)
    for row, (spend, text) in enumerate(zip(spends, texts, strict=True)):
        length = longest if spend.epsilon is None else spend.epsilon
        low, high = row - 0.31, row + 0.31
        corners = [(0.0, low), (length, low), (length, high), (0.0, high)]
        chart.area(corners, "accent" if text == largest else "bar")
        # In one column, beyond the longest bar, where no target line crosses them.
        chart.write(text, (longest, row), (10, 0), bold=text == largest)
        if spend.target is not None and common_target(spends) is None:
            chart.line([(spend.target, row - 0.42), (spend.target, row + 0.42)], "text", 1.4)
    shared = common_target(spends)
    if shared is not None:
        chart.line([(shared, -0.5), (shared, len(spends) - 0.5)], "muted", 1.1, dash="4 3")
        chart.write(f"target {shared:g}", (shared, -0.5), (0, -9), ink="muted", anchor="middle")
    tips = [Tip(0, row, _spend_text(spend)) for row, spend in enumerate(spends)]
    return chart.svg(label, tips, across=True)


def _ranked(spends: Sequence[Spend], label: str) -> Markup:
    """Draw all clients as one falling curve, without those of infinite ε."""
    known = [(s.epsilon, s) for s in spends if s.epsilon is not None]
    falling = [spend for _, spend in sorted(known, key=lambda pair: -pair[0])]
    epsilons = [spend.epsilon or 0.0 for spend in falling]
    hidden, shared = len(spends) - len(epsilons), common_target(spends)
    shown = _thinned(list(enumerate(epsilons, start=hidden + 1)))
    high = max([*(1.05 * epsilon for epsilon in epsilons), 1.15 * (shared or 0.0)]) or 1.0
    marks = {value: f"{value:,.6g}" for value in ticks(0.0, high)}
    x = Scale(0.5, len(spends) + 0.5, 29 + width_of(marks.values()), _WIDTH_PIXELS - 12)
    chart = Chart(_WIDTH_PIXELS, 240, x, Scale(0.0, high, 202, 12))
    chart.left_axis(marks, "ε")
    below = "clients, by falling ε" + (f" ({hidden} with infinite ε)" if hidden else "")
    places = {value: f"{value:,.0f}" for value in ticks(1, len(spends), whole=True)}
    chart.bottom_axis(places, below)
    if shown:
        first, last = (shown[0][0], 0.0), (shown[-1][0], 0.0)
        chart.area([first, *shown, last])
        chart.line(shown)
    if shared is not None:
        chart.target(shared, f"target {shared:g}")
    tips = [
        Tip(rank, value, f"{rank:,} of {len(spends):,}: {_spend_text(falling[rank - hidden - 1])}")
        for rank, value in shown[:: max(1, len(shown) // _MAX_TIPS)]
    ]
    return chart.svg(label, tips)


def _thinned(points: list[_Point]) -> list[_Point]:
    """Return at most about `_MAX_POINTS` points, evenly spread, the last one among them."""
    stride = -(-len(points) // _MAX_POINTS)
    return points[::-1][::stride][::-1] if stride > 1 else points


def draw_profile(profile: Profile) -> Markup:
    """Return the curve δ(ε) with the pair that is reported marked on it."""
    points = [(epsilon, delta) for epsilon, delta in profile.curve if delta > _MIN_DELTA]
    pair = (profile.epsilon, profile.delta)
    all_points = [*points, pair] if math.isfinite(profile.epsilon) else points
    epsilons, deltas = ([point[axis] for point in all_points] for axis in (0, 1))
    low, high = min(deltas) / 2, max(deltas) * 2
    marks = {delta: _power(delta) for delta in powers(low, high)}
    x = Scale(0.0, max(epsilons) or 1.0, 28 + width_of(marks.values()), _PROFILE_WIDTH - 14)
    chart = Chart(
        _PROFILE_WIDTH,
        _PROFILE_HEIGHT,
        x,
        Scale(low, high, _PROFILE_HEIGHT - 38, 8, logarithmic=True),
    )
    chart.left_axis(marks, "δ")
    chart.bottom_axis({value: f"{value:g}" for value in ticks(0.0, x.high)}, "ε")
    chart.line(points)
    if pair in all_points:
        chart.dot(pair)
        for line, words in enumerate(_words(profile)):
            chart.write(words, pair, (-8, 12 + 14 * line), anchor="end", bold=True)
    stride = max(1, len(points) // 40)
    tips = [
        Tip(epsilon, delta, f"ε = {epsilon_text(epsilon)}: δ ≤ {delta_text(delta)}")
        for epsilon, delta in points[::stride]
    ]
    delta, epsilon = reversed(_words(profile))
    return chart.svg(
        f"δ as a function of ε for client {profile.client}; {delta} at {epsilon}", tips
    )


def draw_attack(attack: AttackBound) -> Markup:
    """Return the bound on the true-positive rate over the false-positive rate, beside guessing."""
    rates, bounds = attack.false_alarms, attack.detection
    guesses, at_most = list(zip(rates, rates, strict=True)), list(zip(rates, bounds, strict=True))
    marks = {step / 5: f"{20 * step}%" for step in range(6)}
    x = Scale(rates[0], 1.0, 28 + width_of(marks.values()), _PROFILE_WIDTH - 18, logarithmic=True)
    chart = Chart(_PROFILE_WIDTH, _PROFILE_HEIGHT, x, Scale(0.0, 1.02, _PROFILE_HEIGHT - 38, 8))
    chart.left_axis(marks, "true-positive rate, at most")
    chart.bottom_axis(
        {r: text for r, text in _RATES.items() if r >= rates[0]}, "false-positive rate"
    )
    chart.area([*at_most, *reversed(guesses)])
    chart.line(at_most)
    chart.line(guesses, "muted", 1.1, dash="4 3")
    chart.write("guessing", (0.14, 0.14), (6, 8), ink="muted")
    tips = [
        Tip(rate, bound, f"FPR {100 * rate:.2g}%: TPR at most {percent_text(bound)}")
        for rate, bound in at_most
    ]
    label = "Bound on the true-positive rate of any attack, over its false-positive rate"
    return chart.svg(label, tips)


def _words(profile: Profile) -> tuple[str, str]:
    return f"ε = {epsilon_text(profile.epsilon)}", f"δ = {delta_text(profile.delta)}"


def _power(value: float) -> str:
    """Return a power of ten in plain text."""
    exponent = round(math.log10(value))
    digits = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1" if exponent == 0 else f"10{digits}"
