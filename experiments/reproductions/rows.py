"""A published result beside its measurement, and the verdict.

Kinds of results. A *number* agrees within a tolerance. An *order* (A is better than B) is
shown by a 95 % interval of the paired differences that lies on the published side of 0. A *law*
(two methods have one distribution) agrees unless a test rejects it at a stated false-alarm rate. A
*limit* (a time) agrees where it is not exceeded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.comparison.statistics import Estimate, paired_difference

Verdict = Literal["agrees", "differs", "unclear", "context"]
"""`unclear`: the interval of an order contains 0. `context`: no value was published."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        what: the quantity and its setting.
        published: the number or claim, as published.
        measured: the measured number, with its interval where it has one.
        tolerance: what decides the verdict.
        verdict: the result of that decision.
    """

    what: str
    published: str
    measured: str
    tolerance: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Unit:
    """How numbers of one quantity are written.

    Attributes:
        scale: factor before a number is written, such as 100 for percent.
        digits: places after the point.
        suffix: such as ` %`.
    """

    scale: float = 1.0
    digits: int = 2
    suffix: str = ""

    def text(self, value: float, *, signed: bool = False) -> str:
        """Return the value in this unit, with its sign where `signed` is set."""
        sign = "+" if signed else ""
        number = f"{value * self.scale:{sign}.{self.digits}f}"
        return f"{number}{self.suffix}".replace("-", "−")

    def interval(self, estimate: Estimate, *, signed: bool = False) -> str:
        """Return the mean with its 95 % interval and the number of seeds."""
        mean = self.text(estimate.mean, signed=signed)
        if estimate.low is None or estimate.high is None:
            return f"{mean} (one seed)"
        low, high = (self.text(end, signed=signed) for end in (estimate.low, estimate.high))
        return f"{mean} [{low}, {high}], {estimate.n} seeds"


def number_row(
    what: str,
    published: float,
    measured: float | Estimate,
    *,
    tolerance: float,
    unit: Unit | None = None,
) -> Row:
    """Return the row of a number, which agrees where the mean is within the tolerance.

    Args:
        what: the quantity and its setting.
        published: the published number.
        measured: a number, or a mean over seeds with its interval.
        tolerance: largest absolute difference that agrees, in units of the quantity.
        unit: how the numbers are written.
    """
    unit = unit or Unit()
    has_seeds = isinstance(measured, Estimate)
    value = measured.mean if has_seeds else measured
    agrees = abs(value - published) <= tolerance
    return Row(
        what=what,
        published=unit.text(published),
        measured=unit.interval(measured) if has_seeds else unit.text(value),
        tolerance=f"± {unit.text(tolerance)}",
        verdict="agrees" if agrees else "differs",
    )


def order_row(
    what: str,
    claim: str,
    values: Sequence[float],
    baseline: Sequence[float],
    *,
    larger: bool,
    unit: Unit | None = None,
) -> Row:
    """Return the row of a published order, judged by paired differences over seeds.

    Args:
        what: the quantity of which differences are taken, and its setting.
        claim: the published order, with its size where one was published.
        values: one number for each seed, of the method that was published as the better one.
        baseline: the other method's numbers for the same seeds.
        larger: whether the claim is that `values` are larger.
        unit: how the differences are written.
    """
    unit = unit or Unit()
    estimate = paired_difference(values, baseline).estimate
    verdict: Verdict = "unclear"
    low, high = estimate.low or 0.0, estimate.high or 0.0  # one seed has no interval
    if low > 0 or high < 0:
        verdict = "agrees" if (low > 0) == larger else "differs"
    return Row(
        what=what,
        published=claim,
        measured=unit.interval(estimate, signed=True),
        tolerance=f"95 % interval {'above' if larger else 'below'} 0",
        verdict=verdict,
    )


def law_row(what: str, claim: str, p_value: float, *, false_alarm: float) -> Row:
    """Return the row of a test whose null hypothesis is the published claim.

    Args:
        what: the statistic and its setting.
        claim: the published claim.
        p_value: of the test.
        false_alarm: probability at most with which a true claim is rejected.
    """
    return Row(
        what=what,
        published=claim,
        measured=f"p = {p_value:.3g}",
        tolerance=f"p ≥ {false_alarm:.2g}",
        verdict="agrees" if p_value >= false_alarm else "differs",
    )


def limit_row(what: str, published: float, measured: float, *, unit: Unit | None = None) -> Row:
    """Return the row of a cost, such as seconds, which agrees where it is not above the published.

    Args:
        what: the quantity and its setting.
        published: the published cost.
        measured: the cost here.
        unit: how both are written.
    """
    unit = unit or Unit()
    return Row(
        what=what,
        published=unit.text(published),
        measured=unit.text(measured),
        tolerance="not above",
        verdict="agrees" if measured <= published else "differs",
    )


def context_row(what: str, measured: str) -> Row:
    """Return a measured quantity that helps to read the others and has no published value."""
    return Row(what=what, published="", measured=measured, tolerance="", verdict="context")
