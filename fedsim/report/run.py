"""A run together with its report."""

from typing import Any

from fedsim.report.html import write_report
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunFailedError, RunResult, run_experiment


def run_with_report(*arguments: Any, **options: Any) -> RunResult:
    """Run an experiment and write its `report.html`, also after a failure.

    Args and errors: as `run_experiment`.
    """
    try:
        result = run_experiment(*arguments, **options)
    except RunFailedError as error:
        write_report(RunDirectory(error.result.path))
        raise
    write_report(RunDirectory(result.path))
    return result
