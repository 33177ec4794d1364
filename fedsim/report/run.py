"""A run together with its report."""

from typing import Any

from fedsim.report.html import write_report
from fedsim.runs.runner import RunResult, run_experiment


def run_with_report(*arguments: Any, **options: Any) -> RunResult:
    """Run an experiment and write its `report.html`, also after a failure.

    Args and errors: as `run_experiment`.
    """
    return run_experiment(*arguments, add_pages=lambda run: write_report(run), **options)
