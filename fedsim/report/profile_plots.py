"""Drawings of a privacy profile: the curve δ(ε), and the bound on attacks."""

import math

from markupsafe import Markup

from fedsim.core.formatting import delta_text, epsilon_text, percent_text
from fedsim.report.chart import Chart, Scale, Tip, powers, ticks, width_of
from fedsim.statement import AttackBound, Profile

_WIDTH, _HEIGHT = 330, 235
_MIN_DELTA = 1e-300
_RATES = {1e-4: "0.01%", 1e-3: "0.1%", 1e-2: "1%", 1e-1: "10%", 1.0: "100%"}


def draw_profile(profile: Profile) -> Markup:
    """Return the curve δ(ε) with the pair that is reported marked on it."""
    points = [(epsilon, delta) for epsilon, delta in profile.curve if delta > _MIN_DELTA]
    pair = (profile.epsilon, profile.delta)
    all_points = [*points, pair] if math.isfinite(profile.epsilon) else points
    epsilons, deltas = ([point[axis] for point in all_points] for axis in (0, 1))
    low, high = min(deltas) / 2, max(deltas) * 2
    marks = {delta: _power(delta) for delta in powers(low, high)}
    x = Scale(0.0, max(epsilons) or 1.0, 28 + width_of(marks.values()), _WIDTH - 14)
    chart = Chart(_WIDTH, _HEIGHT, x, Scale(low, high, _HEIGHT - 38, 8, logarithmic=True))
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
    x = Scale(rates[0], 1.0, 28 + width_of(marks.values()), _WIDTH - 18, logarithmic=True)
    chart = Chart(_WIDTH, _HEIGHT, x, Scale(0.0, 1.02, _HEIGHT - 38, 8))
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
