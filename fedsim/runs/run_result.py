"""The result of a run, which `fedsim.run` returns to Python code and notebooks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fedsim.core.errors import ExitCode, FedsimError, InputError
from fedsim.core.formatting import count_text, metric_text
from fedsim.core.python_objects import callable_of
from fedsim.runs.client_columns import client_columns
from fedsim.runs.directory import RunDirectory
from fedsim.runs.privacy_summary import PrivacySummary
from fedsim.tracking.callbacks import row_numbers

if TYPE_CHECKING:
    import pandas

Status = Literal["completed", "stopped", "interrupted", "failed"]


class MissingPandasError(FedsimError, ImportError):
    """Error of a request for a data frame when pandas is not installed."""

    exit_code = ExitCode.WRONG_INPUT


class RunFailedError(FedsimError, RuntimeError):
    """Error of a run that failed; `result` holds the rounds before the failure."""

    def __init__(self, message: str, result: "RunResult") -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run: final metrics, privacy spend and rounds; `fedsim.run` has an example.

    Attributes:
        path: the run directory.
        status: "completed"; "stopped" if privacy budgets are spent or by early stopping;
            "interrupted" by the user; or "failed".
        reason: why the run ended early; None for a completed run.
        metrics: final metrics of the global model, on the test set (such as `test_accuracy`) and,
            with `evaluation:`, on the clients' held-out examples (`clients_accuracy`).
        privacy: privacy spend of every client; None in a federation without privacy.
        rounds: one mapping for each finished round, as in `rounds.jsonl`.
        seconds: wall-clock time of all rounds, in seconds.
        base: the directory in which the experiment's relative paths start.
        model_name: the setting `model.name`; a `PythonObject` holds a class or function.
        render_head: function that returns the beginning of the report as HTML, for a run directory;
            a notebook shows this HTML. None: a notebook shows `repr`.
        draw: function of (run directory, metric) that returns the metric's figure; None if figures
            cannot be drawn.
    """

    path: Path
    status: Status
    reason: str | None
    metrics: Mapping[str, float]
    privacy: PrivacySummary | None
    rounds: tuple[Mapping[str, Any], ...]
    seconds: float
    base: Path = Path()
    model_name: str = ""
    render_head: Callable[[Path], str] | None = field(default=None, compare=False)
    draw: Callable[[Path, str | None], Any] | None = field(default=None, compare=False)

    def model(self) -> nn.Module:
        """Return the final global model in eval mode; inputs are as in the dataset."""
        from fedsim.runs.saved_model import load_model

        return load_model(self.path, base=self.base, build=callable_of(self.model_name))

    def rounds_frame(self) -> "pandas.DataFrame":
        """Return the numbers of every round as a data frame with index `round` (needs pandas).

        Columns are the keys of `rounds.jsonl`; a list of clients becomes the length of the list.
        Columns such as `timeline.train` have the time of one part of the round, in seconds.

        Raises:
            MissingPandasError: pandas is not installed.
        """
        numbers = [row_numbers(row) for row in self.rounds]
        names = dict.fromkeys(name for row in numbers for name in row)
        table = import_pandas("rounds.jsonl").DataFrame(numbers, columns=[*names] or ["round"])
        return table.set_index("round")

    def clients_frame(self) -> "pandas.DataFrame":
        """Return a data frame with a row for each client, as in `clients.csv`.

        The index is `client`. Empty cells are NaN. With privacy, an infinite ε is ∞.

        Raises:
            MissingPandasError: pandas is not installed.
            RunDirectoryError: the run directory is gone.
        """
        rows = RunDirectory.open(self.path).read_json("privacy.json")["clients"]
        columns: dict[str, list[Any]] = {}
        for column in client_columns(rows):
            infinite = column.name == "epsilon" and self.privacy is not None
            empty = None if column.is_text else math.inf if infinite else math.nan
            values = (row.get(column.name) for row in rows)
            columns[column.name] = [empty if value is None else value for value in values]
        return import_pandas("clients.csv").DataFrame(columns).set_index("client")

    def figure(self, metric: str | None = None) -> Any:
        """Return a figure of one metric over the rounds; a notebook displays the figure.

        Args:
            metric: a column of `rounds_frame`, such as `test_loss` or `epsilon_max`; None means the
                main metric.

        Raises:
            InputError: the run has no such metric.
        """
        if self.draw is None:
            raise InputError("only results of fedsim.run have figures")
        return self.draw(self.path, metric)

    def __repr__(self) -> str:
        figures = (f"{name} {metric_text(name, value)}" for name, value in self.metrics.items())
        guarantee = "no differential privacy" if self.privacy is None else self.privacy.guarantee
        ended = f"{self.status} after {count_text(len(self.rounds), 'round')}"
        return f"RunResult({str(self.path)!r}: {', '.join((ended, *figures, guarantee))})"

    def _repr_html_(self) -> str:
        """Return the head of the report as HTML, for notebooks."""
        if self.render_head is not None and (self.path / "summary.json").is_file():
            return self.render_head(self.path)
        return f"<code>{escape(repr(self))}</code>"


def import_pandas(instead: str) -> Any:
    """Return the module pandas; the error without it names the file `instead`."""
    try:
        import pandas
    except ImportError as error:
        raise MissingPandasError(
            "tables need pandas, which is not installed: pip install pandas, or read "
            f"{instead} in the result's directory"
        ) from error
    return pandas
