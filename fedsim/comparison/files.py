"""The files of a comparison but its page: settings, numbers, tables and figures."""

from pathlib import Path

import yaml

from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.file.load import LoadedComparison
from fedsim.comparison.latex import latex_tables
from fedsim.comparison.results import Results
from fedsim.core.text_formats import csv_text
from fedsim.runs.directory import RunDirectory

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
    from fedsim.comparison.figures.every import write_figures

    directory = RunDirectory(result.path)
    directory.write_json("comparison.json", result.to_json())
    directory.write_text("comparison.csv", _csv(result.results))
    directory.write_text("comparison.tex", latex_tables(result.results))
    write_figures(result.results, result.path)


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
