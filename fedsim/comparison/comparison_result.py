"""The result of a comparison, and functions that write it as JSON, CSV, LaTeX and figures."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedsim
from fedsim.comparison.figures import Picture
from fedsim.comparison.figures.settings import against_settings
from fedsim.comparison.figures.variants import pictures_of
from fedsim.comparison.load import LoadedComparison
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.runs_cost import Tuning
from fedsim.comparison.statistics import CONFIDENCE, Estimate
from fedsim.comparison.text import (
    guarantee_text,
    mean_text,
    metric_words,
    minus_text,
    notes_of,
    p_text,
    scores_json,
    seeds_text,
    unfit_sentences,
)
from fedsim.core.errors import InputError
from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.core.metrics import metric_entry
from fedsim.core.text_formats import csv_text
from fedsim.experiment.schema import yaml_text
from fedsim.report.drawing import ChartFigure, file_svg
from fedsim.report.html import render_page
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import SCHEMAS
from fedsim.runs.run_result import import_pandas

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """The result of a comparison: the numbers of all variants, and the directory of its files.

    Attributes:
        path: directory of the comparison.
        results: means, differences and significance tests of the variants.
        tuning: the privacy cost of all runs together, tuning runs included.
        interrupted: whether the user interrupted the comparison; runs are then missing.
    """

    path: Path
    results: Results
    tuning: Tuning
    interrupted: bool

    @property
    def failed(self) -> tuple[RunOutcome, ...]:
        """The results of the single runs that failed."""
        return tuple(outcome for outcome in self.results.outcomes if outcome.status == "failed")

    def frame(self) -> "pandas.DataFrame":
        """Return a data frame with a row for each variant and seed, as in `comparison.csv`.

        Raises:
            MissingPandasError: pandas is not installed.
        """
        columns, rows = _table_of_runs(self.results)
        return import_pandas("comparison.csv").DataFrame(rows, columns=columns)

    def figure(self, name: str | None = None) -> ChartFigure:
        """Return one figure of the comparison, as an object that a notebook displays.

        Args:
            name: name of a file in `figures/`, such as `rounds`; None means the first one.

        Raises:
            InputError: the comparison has no such figure.
        """
        pictures = {picture.name: picture for picture in _pictures(self.results)}
        chosen = next(iter(pictures), "") if name is None else name
        if chosen not in pictures:
            raise InputError(f"there is no figure {chosen!r}; there are {', '.join(pictures)}")
        return ChartFigure(pictures[chosen].chart)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `comparison.json`."""
        results, sentences = self.results, unfit_sentences(self.results)
        return {
            "schema": SCHEMAS["comparison.json"],
            "name": results.name,
            "metric": results.metric,
            "baseline": results.baseline,
            "seeds": list(results.seeds),
            "confidence": CONFIDENCE,
            "pairing": results.pair_check.to_json(),
            "variants": [{**v.to_json(), "scores": scores_json(v)} for v in results.variants],
            "settings": {name: dict(row) for name, row in results.settings.values.items()},
            "unfit": [{**vars(v), "sentence": sentences[v.variant]} for v in results.unfit],
            "remedy": results.remedy,
            "notes": notes_of(results),
            "tuning": asdict(self.tuning),
        }

    def __repr__(self) -> str:
        results = self.results
        means = ", ".join(f"{v.name} {mean_text(results, v)}" for v in results.variants)
        words, seeds = metric_words(results.metric), seeds_text(results)
        return f"ComparisonResult({str(self.path)!r}: {words}, {seeds}: {means})"

    def _repr_html_(self) -> str:
        """Return the table of the variants as HTML, for notebooks."""
        results = self.results
        shown = {
            "result": self,
            "unfit": unfit_sentences(results).values(),
            "seeds": seeds_text(results),
            "metric": metric_words(results.metric),
            "rows": [
                (v.name, guarantee_text(v), mean_text(results, v), minus_text(results, v))
                for v in results.variants
            ],
        }
        return render_page("notebook.html.jinja", shown, Path(__file__).parent)


_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_NOTHING = "--"


def latex_tables(results: Results) -> str:
    """Return LaTeX tables of the variants: one `tabular` for each privacy unit."""
    return "\n".join(_table(part) for part in results.by_unit)


def _table(results: Results) -> str:
    rows = [_cells(results, variant) for variant in results.variants]
    lines = [
        *_comments(results),
        rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}",
        r"\toprule",
        _line(rows[0]),
        r"\midrule",
        *(_line(row.values()) for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _comments(results: Results) -> list[str]:
    unit, deltas = results.groups[0].unit, results.deltas
    facts = [
        f"{results.name}: {seeds_text(results)}; +- is half a 95 % t interval over the seeds",
        "p: paired t test against the baseline, adjusted by Holm's method",
        f"epsilon: the largest of any client in one run, unit {unit}" if unit else "",
        f"delta = {delta_text(*deltas)}" if len(deltas) == 1 else "",
        *unfit_sentences(results).values(),
        f"written by fedsim {fedsim.__version__}; needs \\usepackage{{booktabs}}",
    ]
    return [f"% {fact}" for fact in facts if fact]


def _cells(results: Results, variant: VariantResult) -> dict[str, str]:
    """Return the cells of a variant by the headings of their columns."""
    metric, delta, difference = results.metric, variant.delta, variant.difference
    percent = metric_entry(metric).in_percent
    epsilon = r"$\infty$" if variant.is_private and delta is not None else _NOTHING
    if variant.epsilon is not None:
        epsilon = rf"$\le {epsilon_text(variant.epsilon)}$"
    cells = {"variant": escape_latex(variant.name), r"$\varepsilon$": epsilon}
    if len(results.deltas) > 1:
        cells[r"$\delta$"] = _NOTHING if delta is None else f"${_mantissa(delta_text(delta))}$"
    words = escape_latex(metric_words(metric)) + (r" (\%)" if percent else "")
    cells[words] = _estimate(variant.metrics.get(metric), metric, sign=False)
    if any(other.difference is not None for other in results.variants):
        minus = f"minus {escape_latex(str(results.baseline))}{' (pp)' if percent else ''}"
        mark = r"$^\dagger$" if difference and variant.unfit else ""
        estimate = difference and difference.estimate
        cells[minus] = _estimate(estimate, metric, sign=True) + mark
        p = difference and difference.holm_p
        cells["$p$"] = _NOTHING if p is None else f"${p_text(p)}$"
    return cells


def _estimate(estimate: Estimate | None, metric: str, *, sign: bool) -> str:
    if estimate is None:
        return _NOTHING
    scale, digits = (100, ".1f") if metric_entry(metric).in_percent else (1, ".3g")
    text = _mantissa(f"{scale * estimate.mean:{'+' if sign else ''}{digits}}")
    if estimate.high is None:
        return f"${text}$"
    half = _mantissa(f"{scale * (estimate.high - estimate.mean):{digits}}")
    return rf"${text} \pm {half}$"


def _mantissa(text: str) -> str:
    """Return a number in LaTeX's scientific notation, with 10^{-5} for `e-05`."""
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    power = rf"10^{{{int(exponent)}}}"
    return power if mantissa == "1" else rf"{mantissa} \cdot {power}"


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def escape_latex(text: str) -> str:
    """Return a text in which LaTeX's special characters are escaped."""
    return "".join(_ESCAPES.get(character, character) for character in " ".join(text.split()))


_FACTS = ("variant", "seed", "status", "private", "trust", "unit")
_SPENT = ("epsilon", "against", "epsilon_against_server", "delta", "rounds", "seconds", "path")


def write_settings(comparison: LoadedComparison, path: Path) -> None:
    """Write `comparison.yaml`: the settings of a comparison, with its seeds and variants listed.

    A directory with this file counts as the directory of a comparison.
    """
    content = {
        "name": comparison.name,
        "base": comparison.written_base,
        "seeds": list(comparison.seeds),
        **comparison.settings.model_dump(exclude={"name", "base", "seeds", "variants"}),
        "variants": {
            variant.name: {**({"arm": variant.arm} if variant.arm else {}), **variant.changes}
            for variant in comparison.variants
        },
    }
    RunDirectory(path.parent).write_text(path.name, yaml_text(content))


def write_comparison(result: ComparisonResult) -> None:
    """Write the JSON, CSV, LaTeX tables and figures of a comparison into its directory."""
    directory = RunDirectory(result.path)
    directory.write_json("comparison.json", result.to_json())
    directory.write_text("comparison.csv", csv_text(*_table_of_runs(result.results)))
    directory.write_text("comparison.tex", latex_tables(result.results))
    write_figures(result.results, result.path)


def write_figures(results: Results, directory: Path) -> None:
    """Write each figure as SVG and CSV into `figures/`, and remove all older SVG and CSV files."""
    folder, pictures = RunDirectory(directory / "figures"), _pictures(results)
    folder.path.mkdir(exist_ok=True)
    names = {picture.name for picture in pictures}
    for path in sorted(folder.path.iterdir()):
        if path.suffix in (".svg", ".csv") and path.stem not in names:
            path.unlink()
    for picture in pictures:
        folder.write_text(f"{picture.name}.svg", file_svg(picture.chart))
        folder.write_text(f"{picture.name}.csv", picture.to_csv())


def _pictures(results: Results) -> list[Picture]:
    drawn = [picture for part in results.by_unit for picture in pictures_of(part).values()]
    settings = [picture for part in results.by_unit for picture in against_settings(part)]
    return [picture for picture in (*drawn, *settings) if picture is not None]


def _table_of_runs(results: Results) -> tuple[list[str], list[list[object]]]:
    """Return columns and rows, a row for each run, from which all results can be recomputed."""
    metrics = dict.fromkeys(name for outcome in results.outcomes for name in outcome.metrics)
    columns = [*_FACTS, *metrics, *_SPENT]
    rows = [
        {**run.to_json(), "private": run.is_private, "epsilon_against_server": server}
        for run in results.outcomes
        for server in (run.certificates.get("server"),)
    ]
    return columns, [[row.get(name) for name in columns] for row in rows]
