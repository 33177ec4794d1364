"""The tables of a comparison's page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.text import (
    common_words,
    difference_text,
    guarantee_text,
    interval_text,
    metric_words,
    observer_text,
    p_text,
    seconds_text,
)
from fedsim.core.formatting import delta_text, duration_text, epsilon_text, metric_text

_MAX_RUNS = 2000


@dataclass(frozen=True)
class TableCell:
    """A cell: its text, and the value to sort by; None sorts last."""

    text: str
    value: float | str | None


@dataclass(frozen=True)
class TableRow:
    """A row of a table, with the number of its variant's colour."""

    name: str
    series: int
    cells: tuple[TableCell, ...]
    link: str | None = None


@dataclass(frozen=True)
class PageTable:
    """A table that can be sorted by each column; the first column has names of variants.

    What all names begin with, such as `target_epsilon=`, is the heading of that column.
    """

    headings: tuple[str, ...]
    rows: tuple[TableRow, ...]


_NOTHING = TableCell("–", None)
_Column = tuple[str, Callable[[VariantResult], TableCell]]


def variants_table(results: Results, series: Mapping[str, int]) -> PageTable:
    """Return the table of the variants: guarantee, mean, difference, tests.

    Trust and observer are columns only where a variant has another trust than local, and δ only
    where variants have different ones.

    Args:
        results: the variants of one unit.
        series: the number of each variant's colour.
    """
    columns = _columns(results)
    prefix = common_words([one.name for one in results.variants])
    return PageTable(
        headings=(prefix or "variant", *(heading for heading, _ in columns)),
        rows=tuple(
            TableRow(
                one.name.removeprefix(prefix),
                series[one.name],
                tuple(cell(one) for _, cell in columns),
            )
            for one in results.variants
        ),
    )


def _columns(results: Results) -> Sequence[_Column]:
    trusts = any(one.trust not in (None, "local") for one in results.variants)
    deltas = {one.delta for one in results.variants if one.delta is not None}
    metric, baseline = results.metric, results.baseline
    columns: list[_Column] = [("guarantee", _guarantee)]
    if len(deltas) > 1:
        columns.append(("δ", _delta))
    columns += [
        (metric_words(metric), lambda one: _mean(one, metric)),
        (f"minus {baseline}", lambda one: _difference(one, metric, one.name == baseline)),
        ("p (t test)", lambda one: _p(one.difference and one.difference.holm_p)),
        ("p (signs)", lambda one: _p(one.difference and one.difference.paired.sign_flip_p)),
    ]
    if trusts:
        columns += [
            ("trust", lambda one: TableCell(one.trust or "–", one.trust)),
            ("observer", lambda one: TableCell(observer_text(one), one.observer)),
        ]
    return [*columns, ("seeds", _seeds), ("time", _time)]


def _guarantee(variant: VariantResult) -> TableCell:
    return TableCell(guarantee_text(variant), variant.epsilon if variant.is_private else None)


def _delta(variant: VariantResult) -> TableCell:
    return (
        _NOTHING if variant.delta is None else TableCell(delta_text(variant.delta), variant.delta)
    )


def _mean(variant: VariantResult, metric: str) -> TableCell:
    estimate = variant.metrics.get(metric)
    return (
        _NOTHING if estimate is None else TableCell(interval_text(metric, estimate), estimate.mean)
    )


def _difference(variant: VariantResult, metric: str, is_baseline: bool) -> TableCell:
    if variant.difference is None:
        return TableCell("baseline", None) if is_baseline else _NOTHING
    estimate = variant.difference.paired.estimate
    return TableCell(difference_text(metric, estimate), estimate.mean)


def _p(value: float | None) -> TableCell:
    return TableCell(p_text(value), value)


def _seeds(variant: VariantResult) -> TableCell:
    finished = len(variant.finished_runs)
    return TableCell(f"{finished}/{len(variant.outcomes)}", finished)


def _time(variant: VariantResult) -> TableCell:
    seconds = variant.seconds
    return TableCell(seconds_text(seconds), None if seconds is None else seconds.mean)


def differences_table(results: Results, series: Mapping[str, int]) -> PageTable | None:
    """Return the settings that differ; None where there are none.

    Args:
        results: the variants of one unit.
        series: the number of each variant's colour.
    """
    found = results.settings.among(one.name for one in results.variants)
    if not found.keys:
        return None
    rows = []
    prefix = common_words([one.name for one in results.variants])
    for one in (one for one in results.variants if one.name in found.values):
        texts = [found.text(one.name, key) for key in found.keys]
        values = [found.values[one.name].get(key) for key in found.keys]
        cells = tuple(
            TableCell(text, value if isinstance(value, int | float) else text)
            for text, value in zip(texts, values, strict=True)
        )
        rows.append(TableRow(one.name.removeprefix(prefix), series[one.name], cells))
    return PageTable((prefix or "variant", *found.keys), tuple(rows))


def runs_table(results: Results, series: Mapping[str, int]) -> PageTable:
    """Return the table of the first runs, each with a link to its report.

    Args:
        results: all variants.
        series: the number of each variant's colour.
    """
    metric = results.metric
    rows = (_run_row(run, metric, series[run.variant]) for run in results.outcomes[:_MAX_RUNS])
    headings = ("variant", "seed", "status", metric_words(metric), "guarantee", "rounds", "time")
    return PageTable(headings, tuple(rows))


def _run_row(run: RunOutcome, metric: str, series: int) -> TableRow:
    value = run.metrics.get(metric)
    epsilon = f"ε ≤ {epsilon_text(run.epsilon)}" if run.is_private and run.is_finished else "none"
    cells = (
        TableCell(str(run.seed), run.seed),
        TableCell(run.status, run.status),
        TableCell(metric_text(metric, value) if metric in run.metrics else "–", value),
        TableCell(epsilon, run.epsilon),
        TableCell(f"{len(run.rounds)}", len(run.rounds)),
        TableCell(duration_text(run.seconds), run.seconds),
    )
    return TableRow(run.variant, series, cells, link=f"{quote(run.path)}/report.html")
