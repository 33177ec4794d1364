"""The Python interface: run an experiment, compare variants, search among them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.report.notebook import notebook_progress
from fedsim.report.run import run_with_report
from fedsim.runs.runner import RunResult
from fedsim.simulation.engine import Engine
from fedsim.tracking.observer import RunObserver


def run(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    base: str | Path | None = None,
    observer: RunObserver | None = None,
    engine: Engine | None = None,
) -> RunResult:
    """Run an experiment, write its run directory with `report.html`, and return its result.

    Args:
        source: path of an experiment file, or its content as a mapping.
        overrides: `{"key.path": value}` or `["key.path=value", ...]`, applied before validation.
        out: the run directory; must be new or empty. Default: `runs/<name>-<time>`.
        resume: continue the run in `out` after its last finished round. The result equals that of
            an uninterrupted run to the bit; the charges of an interrupted round remain.
        base: base directory of relative paths in the experiment; see `load_experiment`.
        observer: receives every round; None: a notebook shows the progress, a script nothing.
        engine: executes the federation instead of the engine in `runtime`.

    Raises:
        ExperimentError: the experiment is wrong; it lists every mistake with its place.
        ValueError: data, model, loss or run directory do not fit.
        PrivacyBudgetError: a privacy budget forbids the plan (a ValueError, too).
        RunFailedError: the federation failed; `result` on the error holds the rounds before.
    """
    return run_with_report(
        source,
        overrides=overrides,
        out=out,
        resume=resume,
        base=base,
        observer=observer or notebook_progress(),
        engine=engine,
    )
