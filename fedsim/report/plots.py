"""Functions that make the charts of the report and of the option `--plot`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsim.core.formatting import (
    aligned_epsilon,
    count_text,
    delta_text,
    epsilon_text,
    least_epsilon_text,
    percent_text,
)
from fedsim.report.chart import (
    SERIES,
    Area,
    Axis,
    Chart,
    Dots,
    Ink,
    Line,
    Mark,
    Note,
    Point,
    number_axis,
    number_text,
    powers,
    room_around,
    target,
    thinned,
    ticks,
    width_of,
)
from fedsim.statement import AttackBound, ClientFacts, Profile

if TYPE_CHECKING:
    from fedsim.planning.bounds import BoundCurve
    from fedsim.planning.projection import Plan

_CURVE_PIXELS = (310, 175)  # about as wide as a phone: text keeps its size there
_PROFILE_PIXELS = (330, 189)
MAX_BARS = 40  # clients above which a curve replaces the bars
_BARS_PIXELS, _BAR_HEIGHT_PIXELS = 400, 21
_RANKS_PIXELS = (400, 190)
_MIN_DELTA = 1e-300
_MAX_TIPS = 100
_SAME_SHARE = 0.99  # share of the largest ε from which bars look the same


@dataclass(frozen=True)
class Over:
    """The horizontal coordinates of the points of a curve, and the labels of their axis."""

    label: str  # of the quantity, below the axis
    values: Sequence[float]  # ascending
    text: Callable[[float], str]  # of a coordinate, such as "round 3"
    whole: bool = False  # only whole numbers are marked


@dataclass(frozen=True)
class Curve:
    """A curve of a quantity over the rounds, or over a cost such as ε."""

    label: str  # of the quantity, in words
    over: Over
    values: Sequence[float | None]  # at each coordinate; None for a value that was not finite
    text: Callable[[float], str]  # of a value; that of the last one stands at its point
    percent: bool = False  # the vertical axis is labelled in percent, and ends at 100 %
    target: float | None = None  # value of a horizontal line for comparison
    target_text: str | None = None  # at this line; None means its value
    from_zero: bool = False  # the vertical axis starts at 0
    logarithmic: bool = False  # the vertical axis

    def chart(self) -> Chart | None:
        """Return the chart of the curve, or None if no value is finite."""
        points = [
            (place, math.nan if value is None else value)
            for place, value in thinned(list(zip(self.over.values, self.values, strict=True)))
        ]
        finite = [(place, value) for place, value in points if math.isfinite(value)]
        if not finite:
            return None
        (end, value), last = finite[-1], self.text(finite[-1][1])
        marks: list[Mark] = [Line(points), Dots([(end, value)])]
        # A target line runs through the label of a spend that reached it: write below the line.
        marks.append(Note(last, (end, value), (6, 0 if self.target is None else 9), bold=True))
        if self.target is not None:
            marks = [*target(self.target, self.target_text or f"target {self.target:g}"), *marks]
        tips = [(x, f"{self.over.text(x)}: {self.text(y)}") for x, y in finite]
        (_, first), (_, final) = tips[0], tips[-1]
        ends = final if len(tips) == 1 else f"from {first} to {final}"
        label, places = f"{self.label} over {self.over.label}, {ends}", self.over.values
        x = number_axis((places[0], places[-1]), self.over.label, whole=self.over.whole)
        room = {"top": 12, "right": 14 + width_of([last])}
        return Chart(label, x, self._axis(finite), marks, *_CURVE_PIXELS, **room, tips=tips)

    def _axis(self, points: Sequence[Point]) -> Axis:
        aim = [] if self.target is None else [self.target]
        values = [*(value for _, value in points), *aim]
        low, high = room_around(values, logarithmic=self.logarithmic)
        if self.from_zero:
            low, high = 0.0, max([high, *(1.15 * target for target in aim)])
        ends = low, min(high, 1.0) if self.percent else high
        return number_axis(ends, logarithmic=self.logarithmic, percent=self.percent, grid=True)


def spend_chart(clients: Sequence[ClientFacts]) -> Chart:
    """Return the chart of every client's ε: bars, or for many clients one curve in sorted order."""
    draw = _bars if len(clients) <= MAX_BARS else _ranked
    return draw(clients, "Epsilon spent by each client; the table below has every number")


def narrow_range(clients: Sequence[ClientFacts]) -> tuple[str, str] | None:
    """Return (smallest, largest) ε of several clients as text if they differ by 1 % at most."""
    epsilons = [client.epsilon for client in clients]
    if len(epsilons) < 2 or not min(epsilons) >= _SAME_SHARE * max(epsilons):
        return None
    return least_epsilon_text(min(epsilons)), epsilon_text(max(epsilons))


def common_target(clients: Sequence[ClientFacts]) -> float | None:
    """Return the target ε if all clients have the same one; None otherwise."""
    targets = {client.target_epsilon for client in clients}
    return targets.pop() if len(targets) == 1 else None


def _spend_text(client: ClientFacts) -> str:
    aim = "" if client.target_epsilon is None else f" of {client.target_epsilon:g}"
    return f"client {client.client}: ε {aligned_epsilon(client.epsilon)}{aim}"


def _bars(clients: Sequence[ClientFacts], label: str) -> Chart:
    finite = [client.epsilon for client in clients if math.isfinite(client.epsilon)]
    targets = [aim for client in clients if (aim := client.target_epsilon) is not None]
    longest = max([*finite, *targets, 1e-9])
    largest = aligned_epsilon(max(finite, default=0.0)) if len(finite) == len(clients) else None
    texts = [aligned_epsilon(client.epsilon) for client in clients]
    shared, marks = common_target(clients), list[Mark]()
    for row, (client, text) in enumerate(zip(clients, texts, strict=True)):
        length = min(client.epsilon, longest)
        low, high = row - 0.31, row + 0.31
        corners = [(0.0, low), (length, low), (length, high), (0.0, high)]
        marks.append(Area(corners, "accent" if text == largest else "bar"))
        # In one column, beyond the longest bar, where no target line crosses them.
        marks.append(Note(text, (longest, row), (10, 0), bold=text == largest))
        if (aim := client.target_epsilon) is not None and shared is None:
            marks.append(Line([(aim, row - 0.42), (aim, row + 0.42)], "text", 1.4))
    if shared is not None:
        marks.append(Line([(shared, math.inf), (shared, -math.inf)], "muted", 1.1, "4 3"))
        marks.append(Note(f"target {shared:g}", (shared, math.inf), (0, -9), "muted", "middle"))
    numbers = {float(row): str(client.client) for row, client in enumerate(clients)}
    y = Axis(len(clients) - 0.5, -0.5, numbers, "client")
    tips = [(row, _spend_text(client)) for row, client in enumerate(clients)]
    x, size = number_axis((0.0, longest), "ε"), (_BARS_PIXELS, len(clients) * _BAR_HEIGHT_PIXELS)
    right = 14 + width_of(texts)
    return Chart(label, x, y, marks, *size, top=22, right=right, tips=tips, across=True)


def _ranked(clients: Sequence[ClientFacts], label: str) -> Chart:
    """Return the chart of all finite ε as one falling curve."""
    known = [client for client in clients if math.isfinite(client.epsilon)]
    falling = sorted(known, key=lambda client: -client.epsilon)
    epsilons = [client.epsilon for client in falling]
    count, hidden, shared = len(clients), len(clients) - len(epsilons), common_target(clients)
    shown = thinned(list(enumerate(epsilons, start=hidden + 1)))
    high = max([*(1.05 * epsilon for epsilon in epsilons), 1.15 * (shared or 0.0)]) or 1.0
    marks: list[Mark] = []
    if shown:
        marks = [Area([(shown[0][0], 0.0), *shown, (shown[-1][0], 0.0)]), Line(shown)]
    if shared is not None:
        marks += target(shared, f"target {shared:g}")
    places = {value: number_text(value) for value in ticks(1, count, whole=True)}
    below = "clients, by falling ε" + (f" ({hidden} with infinite ε)" if hidden else "")
    x, y = Axis(0.5, count + 0.5, places, below), number_axis((0.0, high), "ε", grid=True)
    tips = [
        (rank, f"{rank:,} of {count:,}: {_spend_text(falling[rank - hidden - 1])}")
        for rank, _ in shown[:: max(1, len(shown) // _MAX_TIPS)]
    ]
    return Chart(label, x, y, marks, *_RANKS_PIXELS, top=12, right=12, tips=tips)


def profile_chart(profile: Profile) -> Chart:
    """Return the chart of a profile δ(ε) that has a curve, with a dot at the reported (ε, δ)."""
    points = [(epsilon, delta) for epsilon, delta in profile.curve if delta > _MIN_DELTA]
    pair = (profile.epsilon, profile.delta)
    epsilons, deltas = zip(*points, pair, strict=True)
    low, high = min(deltas) / 2, max(deltas) * 2
    words = (f"ε = {epsilon_text(profile.epsilon)}", f"δ = {delta_text(profile.delta)}")
    marks: list[Mark] = [Line(points), Dots([pair])]
    for line, text in enumerate(words):
        marks.append(Note(text, pair, (-8, 12 + 14 * line), anchor="end", bold=True))
    x, decades = number_axis((0.0, max(epsilons) or 1.0), "ε"), powers(low, high)
    y = Axis(low, high, {ten: _power(ten) for ten in decades}, "δ", logarithmic=True, grid=True)
    tips = [
        (epsilon, f"ε = {epsilon_text(epsilon)}: δ ≤ {delta_text(delta)}")
        for epsilon, delta in points[:: max(1, len(points) // 40)]
    ]
    label = f"δ as a function of ε for client {profile.client}; {words[1]} at {words[0]}"
    return Chart(label, x, y, marks, *_PROFILE_PIXELS, right=14, tips=tips)


def attack_chart(attack: AttackBound) -> Chart:
    """Return the chart of the largest true-positive rate of any attack, by false-positive rate."""
    rates, bounds = attack.false_alarms, attack.detection
    guesses, at_most = list(zip(rates, rates, strict=True)), list(zip(rates, bounds, strict=True))
    x = number_axis((rates[0], 1.0), "false-positive rate", logarithmic=True, percent=True)
    y = number_axis((0.0, 1.02), "true-positive rate, at most", percent=True, grid=True)
    marks: list[Mark] = [Area([*at_most, *reversed(guesses)]), Line(at_most)]
    marks.append(Line(guesses, "muted", 1.1, "4 3"))
    marks.append(Note("guessing", (0.14, 0.14), (6, 8), "muted"))
    tips = [
        (rate, f"FPR {100 * rate:.2g}%: TPR at most {percent_text(bound)}")
        for rate, bound in at_most
    ]
    label = "Bound on the true-positive rate of any attack, over its false-positive rate"
    return Chart(label, x, y, marks, *_PROFILE_PIXELS, right=18, tips=tips)


def _power(value: float) -> str:
    """Return a power of ten in plain text."""
    exponent = round(math.log10(value))
    digits = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1" if exponent == 0 else f"10{digits}"


_LINES_PIXELS = (504, 270)
_PLAN_PIXELS = (460, 240)
_MAX_DOTS = 60  # points of a line; with more, the line has no dots


def line_chart(
    lines: Mapping[str, Sequence[float | None]],
    xs: Sequence[float],
    title: str,
    x_label: str,
    y_label: str,
    *,
    log_x: bool = True,
    dotted: Sequence[float] | None = None,
) -> Chart:
    """Return a chart of lines over a common horizontal axis, with each line's name at its end.

    `lines` has the values of each line at `xs`, which ascend; a value that is None, not finite or
    not above 0 is left out. The vertical axis is logarithmic, and with `log_x` the horizontal one,
    too. Lines have a dot at the coordinates `dotted` among `xs`; None means at all.
    """
    marks, ends, values = list[Mark](), list[tuple[str, Point, Ink]](), list[float]()
    places = set(xs if dotted is None else dotted)
    for index, (name, line) in enumerate(lines.items()):
        pairs, ink = zip(xs, line, strict=True), SERIES[index % len(SERIES)]
        points = [(x, y) for x, y in pairs if y is not None and math.isfinite(y) and y > 0]
        if points:
            dots = [point for point in points if point[0] in places]
            marks += [Line(points, ink), Dots(dots if len(dots) <= _MAX_DOTS else (), ink)]
            ends.append((name, points[-1], ink))
            values += [y for _, y in points]
    x = number_axis(room_around(xs, logarithmic=log_x), x_label, logarithmic=log_x)
    ends_y = room_around(values or [1.0], logarithmic=True)
    y = number_axis(ends_y, y_label, logarithmic=True, grid=True)
    label = f"{y_label} against {x_label}: {' '.join(title.split())}"
    return Chart(label, x, y, marks, *_LINES_PIXELS, names=ends, heading=title)


def bounds_chart(
    curve: "BoundCurve", *, dotted: Sequence[int] | None = None, whose: str = ""
) -> Chart:
    """Return a chart of ε over the number of steps, with a line for each bound on ε.

    A text beside each line names the bound and its ε after all steps. `dotted` are the numbers of
    steps with a dot (None: all); `whose` names the clients that take the steps.
    """
    steps = [steps for steps, _ in curve.points]
    lines = {
        f"{bound.label} {epsilon_text(last)}": [epsilons[index] for _, epsilons in curve.points]
        for index, (bound, last) in enumerate(zip(curve.bounds, curve.last, strict=True))
        if last is not None
    }
    settings = f"{whose}: {curve.schedule.text}" if whose else curve.schedule.text
    title = f"{settings}\nbeside each line: ε after {count_text(steps[-1], 'step')}"
    log_x = steps[-1] >= 10 * steps[0]
    return line_chart(lines, steps, title, "steps", "ε", log_x=log_x, dotted=dotted)


def plan_chart(plan: "Plan") -> Chart:
    """Return a chart of each client's planned ε over the number of rounds with the client."""
    curves = [
        [(0.0, 0.0), *((float(n), value) for n, value in client.curve if math.isfinite(value))]
        for client in plan.clients
    ]
    points, aim = [point for curve in curves for point in curve], plan.target_epsilon
    marks: list[Mark] = [Line(curve, width=1.2, opacity=0.5) for curve in curves]
    marks += [] if aim is None else target(aim, "target")
    _, high = room_around([0.0, aim or 0.0, *(value for _, value in points)])
    rounds, delta = (0.0, max((place for place, _ in points), default=1.0)), f"δ = {plan.delta:g}"
    x = number_axis(rounds, "rounds that the client took part in", whole=True)
    y = number_axis((0.0, high), f"ε at {delta}", grid=True)
    return Chart(f"Planned ε of each client at {delta}", x, y, marks, *_PLAN_PIXELS, right=18)
