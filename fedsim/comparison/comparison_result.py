"""The result of a comparison, and its files but the page: settings, numbers, tables, figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

import fedsim
from fedsim.comparison.figures.settings import against_settings
from fedsim.comparison.figures.variants import pictures_of
from fedsim.comparison.load import LoadedComparison
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import Estimate
from fedsim.comparison.text import (
    difference_text,
    guarantee_text,
    interval_text,
    metric_words,
    notes_of,
    p_text,
    scores_json,
    seeds_text,
)
from fedsim.comparison.tuning import Tuning
from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.core.metrics import metric_entry
from fedsim.core.text_formats import csv_text
from fedsim.report.drawing import file_svg
from fedsim.runs.directory import RunDirectory


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """The result of a comparison.

    Attributes:
        path: directory of the comparison.
        results: means, differences and tests.
        tuning: privacy cost of all runs together.
        interrupted: whether the user stopped it; runs are then missing.
    """

    path: Path
    results: Results
    tuning: Tuning
    interrupted: bool

    @property
    def failed(self) -> tuple[RunOutcome, ...]:
        """The runs that failed."""
        return tuple(one for one in self.results.outcomes if one.status == "failed")

    def to_json(self) -> dict[str, Any]:
        """Return the content of `comparison.json`."""
        content = self.results.to_json()
        for entry, variant in zip(content["variants"], self.results.variants, strict=True):
            entry["scores"] = scores_json(variant)
        return {**content, "notes": notes_of(self.results), "tuning": self.tuning.to_json()}

    def __repr__(self) -> str:
        results = self.results
        means = [f"{one.name} {self._mean(one)}" for one in results.variants]
        seeds = seeds_text(results)
        return (
            f"ComparisonResult({str(self.path)!r}: {metric_words(results.metric)}, {seeds}: "
            f"{', '.join(means)})"
        )

    def _repr_html_(self) -> str:
        """Return the table of the variants, for notebooks."""
        results = self.results
        head = ("variant", "guarantee", metric_words(results.metric), "minus baseline")
        rows = [
            (one.name, guarantee_text(one), self._mean(one), self._difference(one))
            for one in results.variants
        ]
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        page = f"<code>{escape(str(self.path / 'comparison.html'))}</code>"
        return (
            f"<p><b>{escape(results.name)}</b>: {seeds_text(results)}; the whole report: "
            f"{page}</p><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _mean(self, variant: VariantResult) -> str:
        estimate = variant.metrics.get(self.results.metric)
        return "–" if estimate is None else interval_text(self.results.metric, estimate)

    def _difference(self, variant: VariantResult) -> str:
        difference = variant.difference
        if difference is None:
            return "–"
        return difference_text(self.results.metric, difference.paired.estimate)


_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_NOTHING = "--"


def latex_tables(results: Results) -> str:
    """Return a `tabular` for the variants of each unit of privacy."""
    return "\n".join(_table(part) for part in results.by_unit)


def _table(results: Results) -> str:
    metric = results.metric
    deltas = {one.delta for one in results.variants if one.delta is not None}
    percent = metric_entry(metric).in_percent
    with_tests = any(one.difference is not None for one in results.variants)
    heads = [
        "variant",
        r"$\varepsilon$",
        *([r"$\delta$"] if len(deltas) > 1 else []),
        escape_latex(metric_words(metric)) + (r" (\%)" if percent else ""),
    ]
    if with_tests:
        heads += [f"minus {escape_latex(str(results.baseline))}{' (pp)' if percent else ''}", "$p$"]
    lines = [
        *_comments(results, deltas),
        rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"\toprule",
        _line(heads),
        r"\midrule",
        *(_row(one, metric, deltas=len(deltas) > 1, tests=with_tests) for one in results.variants),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _comments(results: Results, deltas: set[float]) -> list[str]:
    unit = results.groups[0].unit
    facts = [
        f"{results.name}: {seeds_text(results)}; +- is half a 95 % t interval over the seeds",
        "p: paired t test against the baseline, adjusted by Holm's method",
        f"epsilon: the largest of any client in one run, unit {unit}" if unit else "",
        f"delta = {delta_text(next(iter(deltas)))}" if len(deltas) == 1 else "",
        f"written by fedsim {fedsim.__version__}; needs \\usepackage{{booktabs}}",
    ]
    return [f"% {fact}" for fact in facts if fact]


def _row(variant: VariantResult, metric: str, *, deltas: bool, tests: bool) -> str:
    difference = variant.difference
    epsilon = _NOTHING
    if variant.is_private and variant.delta is not None:
        finite = variant.epsilon is not None
        epsilon = rf"$\le {epsilon_text(variant.epsilon)}$" if finite else r"$\infty$"
    cells = [escape_latex(variant.name), epsilon]
    if deltas:
        cells.append(_NOTHING if variant.delta is None else _number(delta_text(variant.delta)))
    cells.append(_estimate(variant.metrics.get(metric), metric, sign=False))
    if tests:
        cells.append(_estimate(difference and difference.paired.estimate, metric, sign=True))
        p = None if difference is None else difference.holm_p
        cells.append(_NOTHING if p is None else f"${p_text(p)}$")
    return _line(cells)


def _estimate(estimate: Estimate | None, metric: str, *, sign: bool) -> str:
    if estimate is None:
        return _NOTHING
    scale, digits = (100, ".1f") if metric_entry(metric).in_percent else (1, ".3g")
    text = _mantissa(f"{scale * estimate.mean:{'+' if sign else ''}{digits}}")
    if estimate.high is None:
        return f"${text}$"
    half = _mantissa(f"{scale * (estimate.high - estimate.mean):{digits}}")
    return rf"${text} \pm {half}$"


def _number(text: str) -> str:
    return f"${_mantissa(text)}$"


def _mantissa(text: str) -> str:
    """Return a number without the `e` of programs: `1e-05` is 10 to the power of -5."""
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    power = rf"10^{{{int(exponent)}}}"
    return power if mantissa == "1" else rf"{mantissa} \cdot {power}"


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def escape_latex(text: str) -> str:
    """Return a text with every character that LaTeX would read as a command escaped."""
    return "".join(_ESCAPES.get(character, character) for character in " ".join(text.split()))


FIGURES = "figures"  # the directory of its figures
_FACTS = ("variant", "seed", "status", "private", "trust", "unit")
_SPENT = ("epsilon", "against", "epsilon_against_server", "delta", "rounds", "seconds", "path")


def write_settings(comparison: LoadedComparison, path: Path) -> None:
    """Write `comparison.yaml` with seeds and grids written out; it marks the directory.

    Args:
        comparison: the checked comparison.
        path: path of the file.
    """
    settings = comparison.settings
    content = {
        "name": comparison.name,
        "base": str(comparison.base.absolute()),
        "seeds": list(comparison.seeds),
        "baseline": settings.baseline,
        "metric": settings.metric,
        "client_metrics": settings.client_metrics,
        "select": None if settings.select is None else settings.select.model_dump(),
        "variants": {variant.name: dict(variant.changes) for variant in comparison.variants},
    }
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    RunDirectory(path.parent).write_text(path.name, text)


def write_comparison(result: ComparisonResult) -> None:
    """Write the results of a comparison as JSON, as tables, and as figures."""
    directory = RunDirectory(result.path)
    directory.write_json("comparison.json", result.to_json())
    directory.write_text("comparison.csv", _csv(result.results))
    directory.write_text("comparison.tex", latex_tables(result.results))
    write_figures(result.results, result.path)


def write_figures(results: Results, directory: Path) -> None:
    """Write each figure as SVG and as CSV into `figures/`; former figures are removed.

    Args:
        results: the results of the comparison.
        directory: its directory.
    """
    folder = directory / FIGURES
    folder.mkdir(exist_ok=True)
    found = [one for part in results.by_unit for one in pictures_of(part).values()]
    pictures = [one for one in found if one is not None]
    pictures += [one for part in results.by_unit for one in against_settings(part)]
    files = {f"{one.name}.{kind}" for one in pictures for kind in ("svg", "csv")}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".svg", ".csv") and path.name not in files:
            path.unlink()
    writer = RunDirectory(folder)
    for one in pictures:
        writer.write_text(f"{one.name}.svg", file_svg(one.chart))
        writer.write_text(f"{one.name}.csv", one.to_csv())


def _csv(results: Results) -> str:
    """Return one line for each run, from which all results can be recomputed."""
    metrics = list(dict.fromkeys(name for one in results.outcomes for name in one.metrics))
    columns = (*_FACTS, *metrics, *_SPENT)
    rows: list[list[object]] = []
    for one in results.outcomes:
        against_server = one.certificates.get("server")
        row = {
            **one.to_json(),
            "private": one.is_private,
            "epsilon_against_server": against_server,
        }
        rows.append([row.get(name) for name in columns])
    return csv_text(columns, rows)
