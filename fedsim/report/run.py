"""A run together with its report."""

from dataclasses import replace
from typing import Any

from fedsim.report.head import render_head
from fedsim.report.html import write_report
from fedsim.runs.runner import RunFailedError, RunResult, run_experiment


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
