"""A run together with its report, and the head of the report for notebooks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.report import overview
from fedsim.report.contents import read_contents
from fedsim.report.html import page_templates, write_report
from fedsim.report.points import guarantees, warnings
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunFailedError, RunResult, run_experiment
from fedsim.statement import statement_of


def render_head(path: Path) -> str:
    """Return the figures and the guarantee of a run directory as a fragment of HTML.

    Its styles apply to the fragment alone. All text from files is escaped.

    Raises:
        RunDirectoryError: the run has no result files.
    """
    contents = read_contents(RunDirectory.open(path))
    sentences = statement_of(contents.facts)
    return (
        page_templates()
        .get_template("head.html.jinja")
        .render(
            name=contents.summary["name"],
            status=contents.summary["status"],
            reason=contents.summary["reason"],
            cards=overview.cards(contents),
            guarantees=guarantees(sentences),
            warnings=warnings(sentences),
            report=(path / "report.html").as_posix(),
        )
    )


def run_with_report(*arguments: Any, **options: Any) -> RunResult:
    """Run an experiment and write its `report.html`, also after a failure.

    Args and errors: as `run_experiment`.
    """
    try:
        result = run_experiment(*arguments, add_pages=lambda run: write_report(run), **options)
    except RunFailedError as error:
        error.result = replace(error.result, render_head=render_head)
        raise
    return replace(result, render_head=render_head)
