"""Formatting of numbers as text for reports and the terminal."""

import math
import re
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from fedsim.core.metrics import metric_entry

_MAX_NAMED_CLIENTS = 10
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def epsilon_text(epsilon: float | None) -> str:
    """Return an upper bound of ε as text with 4 significant digits, rounded up.

    Example:
        >>> from fedsim.core.formatting import epsilon_text
        >>> epsilon_text(7.99912)
        '8'
    """
    return _four_digits(epsilon, ROUND_CEILING)


def least_epsilon_text(epsilon: float) -> str:
    """Return a lower bound of ε as text with 4 significant digits, rounded down."""
    return _four_digits(epsilon, ROUND_FLOOR)


def _four_digits(epsilon: float | None, rounding: str) -> str:
    if epsilon is None or math.isinf(epsilon):
        return "∞"
    if epsilon == 0:
        return "0"
    value = Decimal(repr(float(epsilon)))  # repr is the shortest text: 7.99 stays 7.99
    step = Decimal(1).scaleb(value.adjusted() - 3)
    return f"{value.quantize(step, rounding=rounding).normalize():f}"


def aligned_epsilon(epsilon: float | None) -> str:
    """Return ε as text, rounded up, with 4 significant digits and trailing zeros, for a column."""
    text = epsilon_text(epsilon)
    digits = sum(character.isdigit() for character in text.lstrip("0."))
    if digits == 0 or digits >= 4:
        return text
    return text + ("" if "." in text else ".") + "0" * (4 - digits)


def delta_text(delta: float) -> str:
    """Return δ as text with at most 4 significant digits, rounded up."""
    value = Decimal(repr(float(delta)))
    if value == 0:
        return "0"
    step = Decimal(1).scaleb(value.adjusted() - 3)
    return f"{float(value.quantize(step, rounding=ROUND_CEILING)):g}"


def percent_text(share: float) -> str:
    """Return a share in [0, 1] as percent, rounded up to one decimal (two decimals below 1 %)."""
    digits = 2 if share < 0.01 else 1
    step = Decimal(1).scaleb(-digits)
    percent = (Decimal(repr(min(share, 1.0))) * 100).quantize(step, rounding=ROUND_CEILING)
    return f"{min(percent, Decimal(100)).normalize():f}%"


def or_dash(value: float | None) -> str:
    """Return a number as text with up to 6 significant digits; return a dash for None."""
    return "–" if value is None else f"{value:g}"


def metric_text(name: str, value: float | None) -> str:
    """Return a metric's value as text.

    Metrics such as accuracy are in percent with one decimal, others have 4 significant digits.

    Args:
        name: name of the metric.
        value: the metric's value; None if it is not finite.
    """
    if value is None:
        return "not finite"
    return f"{value:.1%}" if metric_entry(name).in_percent else f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """Return a duration as text in its two largest units; below 0.1 s in milliseconds."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def clients_text(clients: Sequence[int]) -> str:
    """Return client numbers as text, naming at most ten: `clients 1, 2 and 5 more`."""
    word = "client" if len(clients) == 1 else "clients"
    return f"{word} {some_of([str(client) for client in clients], _MAX_NAMED_CLIENTS)}"


def some_of(words: Sequence[str], most: int) -> str:
    """Return words as text, naming at most `most`: `a, b and 5 more`."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more:,} more" if more > 0 else "")


def shortened(text: str, most: int) -> str:
    """Return at most `most` characters of the text; the last one is `…` if the text was cut."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def printable(text: str) -> str:
    """Return a text with `?` for each control character, which a terminal would obey."""
    return _CONTROL.sub("?", text)


def dtype_text(dtype: object) -> str:
    """Return the name of a dtype of PyTorch without the package, such as float32."""
    return str(dtype).removeprefix("torch.")


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun, in singular or plural: `1 round`, `2 rounds`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def range_text(values: Sequence[float], digits: int = 4) -> str:
    """Return the smallest and largest value as text, such as `0.1 to 0.9`; `0.5` if equal.

    Args:
        values: the values, at least one.
        digits: number of significant digits.
    """
    low, high = (f"{value:.{digits}g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
