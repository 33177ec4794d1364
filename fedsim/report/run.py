"""`fedsim.run`: run an experiment, write its report, and show the result in a notebook."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.report import overview
from fedsim.report.contents import read_contents
from fedsim.report.drawing import ChartFigure
from fedsim.report.html import headlines, render_page, write_report
from fedsim.report.progress import notebook_progress
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunFailedError, RunResult, run_experiment
from fedsim.simulation.engine import Engine
from fedsim.tracking.callbacks import RunCallback


def render_head(path: Path) -> str:
    """Return the headline figures and the guarantee of a run as a piece of HTML, for any page.

    All text from files is escaped. A run without result files raises a RunDirectoryError.
    """
    head = headlines(read_contents(RunDirectory.open(path)))
    return render_page("head.html.jinja", {**head, "report": (path / "report.html").as_posix()})


def draw(path: Path, metric: str | None) -> ChartFigure:
    """Return a figure of a metric (None: the main one) of a run; an unknown one: InputError."""
    return ChartFigure(overview.metric_chart(read_contents(RunDirectory.open(path)), metric))


def run(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    base: str | Path | None = None,
    callback: RunCallback | None = None,
    engine: Engine | None = None,
) -> RunResult:
    """Run an experiment, write its run directory with `report.html`, and return its result.

    The report is written after a failure, too.

    Example:
        Four clients train a model that a notebook defines, on its arrays, each with ε = 8.

        >>> import fedsim
        >>> from sklearn.datasets import load_digits
        >>> from torch import nn
        >>>
        >>> x, y = load_digits(return_X_y=True)
        >>> def build(width):
        ...     return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        >>>
        >>> experiment = {
        ...     "name": "digits",
        ...     "data": {
        ...         "dataset": (x / 16, y),
        ...         "partition": {"scheme": "iid", "num_clients": 4},
        ...     },
        ...     "model": {"name": build, "args": {"width": 32}},
        ...     "federation": {"rounds": 20},
        ...     "local": {"steps": 5, "batch_size": 64, "optimizer": {"name": "sgd", "lr": 1.0}},
        ...     "privacy": {"target_epsilon": 8.0, "delta": 1e-4, "max_grad_norm": 0.5},
        ... }
        >>> result = fedsim.run(experiment)
        >>> result.status, result.metrics["test_accuracy"] > 0.7, result.privacy.system_epsilon <= 8
        ('completed', True, True)
        >>> rounds, clients = result.rounds_frame(), result.clients_frame()  # with pandas
        >>> figure, model = result.figure(), result.model()

        `fedsim.compare(experiment, vary={"privacy.target_epsilon": [None, 8, 2]}, seeds=3)` runs
        variants of this experiment. docs/reference/keys.md has every key.

    Args:
        source: path of an experiment file, or its content as a mapping. In a mapping,
            `data.dataset` may be arrays, tensors or data frames, (x, y) or (x_train, y_train,
            x_test, y_test), or a function `load(seed, **args)` that returns them; `model.name` a
            class or a function that returns a module; `model.loss` a function of (outputs, targets)
            that returns a loss for each example. The run directory has only names and digests of
            such objects: give the objects again to resume the run, or to load its model elsewhere.
        overrides: `{"key.path": value}` or `["key.path=value", ...]`, applied before validation.
        out: the run directory; must be new or empty. Default: `runs/<name>-<time>`.
        resume: whether to continue the run in `out` after its last finished round. The result
            equals that of an uninterrupted run to the bit. Charges of an interrupted round remain.
        base: the directory that relative paths in the experiment refer to; see `load_experiment`.
        callback: callback that receives every round; with None, a notebook shows the progress, and
            a script nothing.
        engine: engine that executes the federation; None means the engine in `runtime`.

    Raises:
        ExperimentError: the experiment is wrong; it lists every mistake with its place.
        ValueError: data, model, loss or run directory do not fit.
        PrivacyBudgetError: a privacy budget forbids the plan (a ValueError, too).
        RunFailedError: the federation failed; `result` on the error holds the rounds before.
    """
    try:
        result = run_experiment(
            source,
            overrides=overrides,
            out=out,
            resume=resume,
            base=base,
            callback=callback or notebook_progress(),
            engine=engine,
            add_pages=write_report,
        )
    except RunFailedError as error:
        error.result = replace(error.result, render_head=render_head, draw=draw)
        raise
    return replace(result, render_head=render_head, draw=draw)
