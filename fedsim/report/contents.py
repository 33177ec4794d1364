"""The content of the report: the files of a run directory, and sentences on the model's scores.

A high accuracy can hide that a model never predicts a rare class. So the report has the accuracy of
always predicting the most frequent class, the recall of each class, and a warning.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from fedsim.core.formatting import metric_text, some_of
from fedsim.core.metrics import LOSS, METRICS, TASK_OF_LOSS, metric_key
from fedsim.core.settings import first_mistake
from fedsim.core.text_formats import FormatError, parse_plain_yaml
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.runs.files import DamagedRunError, read_bytes
from fedsim.runs.recorded_figures import CLIENT_DATA, SCORES
from fedsim.runs.records import absent_clients
from fedsim.statement import Facts, RunFacts, read_facts

_MAX_LISTED = 4  # classes in a line of a terminal; of more classes, those with the lowest recall
_NUM_LOWEST = 3
_MAX_NAMED = 5  # classes in a sentence


class ClassScore(BaseModel, frozen=True):
    """The scores of one class or label on the test set."""

    name: str = Field(alias="class")
    examples: int
    predicted: int
    recall: float | None  # None without examples
    precision: float | None  # None without predictions

    @property
    def hits(self) -> int:
        """Number of examples of the class that are correctly predicted as this class."""
        return round((self.recall or 0.0) * self.examples)

    @property
    def is_missed(self) -> bool:
        """Whether the class has examples, and the model predicts it for none of them."""
        return self.examples > 0 and self.hits == 0


class GroupScore(BaseModel, frozen=True):
    """The accuracy on one group of test examples, such as the patients of a hospital."""

    name: str = Field(alias="group")
    examples: int
    accuracy: float


class Majority(BaseModel, frozen=True):
    """The most frequent class of the test set."""

    name: str | None = Field(alias="class")  # None for several labels
    share: float  # accuracy of always predicting it


class Scores(BaseModel, frozen=True):
    """The scores of a run's final model on the test set, as in `scores.json`."""

    classes: tuple[ClassScore, ...] = Field(alias="by_class")  # empty in regression
    confusion: tuple[tuple[int, ...], ...] | None  # true classes are rows, predicted are columns
    majority: Majority | None  # None in regression
    metrics: Mapping[str, Any]  # of the last round, by name
    group: str | None = None  # the column that divides the test set into groups
    groups: tuple[GroupScore, ...] = Field(default=(), alias="by_group")

    def model_post_init(self, context: object) -> None:
        """Refuse (ValueError) parts that differ in their classes."""
        names = (None, *(score.name for score in self.classes))
        if self.majority is not None and self.majority.name not in names:
            raise ValueError(f"majority has class {self.majority.name!r:.40}, by_class has not")
        if self.confusion is not None and len(self.confusion) != len(self.classes):
            raise ValueError("confusion and by_class have other numbers of classes")

    @property
    def examples(self) -> int:
        """Number of test examples of all classes."""
        return sum(score.examples for score in self.classes)

    @property
    def accuracy(self) -> float | None:
        """Share of the model's predictions that are correct; None in regression."""
        if self.majority is None:
            return None
        if self.majority.name is None or not self.examples:
            return self.metrics.get("accuracy")
        return sum(score.hits for score in self.classes) / self.examples

    @property
    def is_constant(self) -> bool:
        """Whether the model is no better than a constant prediction, by accuracy or R²."""
        if self.accuracy is not None and self.majority is not None:
            return self.accuracy <= self.majority.share
        r2 = self.metrics.get("r2")
        return r2 is not None and r2 <= 0

    @property
    def constant_class(self) -> str | None:
        """The class that the model predicts for every test example; None if it predicts several."""
        predicted = [score.name for score in self.classes if score.predicted]
        return predicted[0] if len(predicted) == 1 and not self.has_labels else None

    def constant_metrics(self, loss: str) -> dict[str, float]:
        """Return the known test metrics of the best constant prediction, for a `model.loss`."""
        values = {name: entry.constant for name, entry in METRICS.items()}
        if self.majority is not None:
            values["accuracy"] = self.majority.share
        if self.majority is not None and self.majority.name is not None and self.examples:
            shares = [score.examples / self.examples for score in self.classes if score.examples]
            values["balanced_accuracy"] = 1.0 / len(shares)
            values["log_loss"] = -sum(share * math.log(share) for share in shares)
            if TASK_OF_LOSS.get(loss) in ("classification", "labels"):
                values[LOSS] = values["log_loss"]
        mse, r2 = self.metrics.get("mse"), self.metrics.get("r2")
        if mse is not None and r2 is not None and r2 < 1.0:
            variance = mse / (1.0 - r2)
            values |= {"mse": variance, "rmse": math.sqrt(variance)}
            if TASK_OF_LOSS.get(loss) == "regression":
                values[LOSS] = variance
        return {name: value for name, value in values.items() if value is not None}

    @property
    def by_recall(self) -> list[ClassScore]:
        """The scores of the classes that have test examples, sorted by recall, lowest first."""
        known = [score for score in self.classes if score.recall is not None]
        return sorted(known, key=lambda score: score.recall or 0.0)

    @property
    def has_labels(self) -> bool:
        """Whether one example can have several labels (multi-label classification)."""
        return self.majority is not None and self.majority.name is None

    @property
    def noun(self) -> str:
        """The word for a class: "label" if an example can have several, else "class"."""
        return "label" if self.has_labels else "class"

    @property
    def baseline(self) -> str | None:
        """The accuracy of always predicting the largest class, as text; None in regression."""
        if self.majority is None:
            return None
        return f"majority baseline {metric_text('accuracy', self.majority.share)}"

    @property
    def baseline_sentence(self) -> str | None:
        """A sentence on the accuracy of the best constant prediction; None in regression."""
        if self.majority is None:
            return None
        share = metric_text("accuracy", self.majority.share)
        if self.majority.name is None:
            return f"Always predicting the more frequent value of each label has accuracy {share}."
        most = next(score for score in self.classes if score.name == self.majority.name)
        return (
            f"Always predicting {quoted(most.name)} has accuracy {share}: it is the class of "
            f"{most.examples:,} of {self.examples:,} test examples."
        )

    @property
    def warnings(self) -> list[str]:
        """Warnings: a class that is never predicted, a model no better than a constant."""
        messages = []
        missed = [score for score in self.classes if score.is_missed]
        if len(missed) == 1:
            messages.append(
                f"The model finds none of the {missed[0].examples:,} test examples of {self.noun} "
                f"{quoted(missed[0].name)}: its recall is 0%."
            )
        elif missed:
            names = some_of([quoted(score.name) for score in missed], _MAX_NAMED)
            plural = "labels" if self.has_labels else "classes"
            messages.append(
                f"The model finds no test example of {len(missed)} of {len(self.classes)} "
                f"{plural}, {names}: their recall is 0%."
            )
        if self.is_constant and self.majority is not None:
            accuracy = metric_text("accuracy", self.accuracy)
            messages.append(
                f"The accuracy is not above that of a constant answer: {accuracy}, {self.baseline}."
            )
        elif self.is_constant:
            messages.append(
                "The model is no better than the mean of the test targets: its R² is "
                f"{metric_text('r2', self.metrics['r2'])}, not above 0."
            )
        return messages

    @property
    def lines(self) -> list[str]:
        """Lines with the recall of each of several classes, and with the accuracy of each group.

        For more than four of them, a line has only the three lowest values.
        """
        recalls = [(score.name, score.recall) for score in self.classes if score.recall is not None]
        lines = [_lowest(f"recall by {self.noun}", recalls)] if len(recalls) > 1 else []
        if self.group is not None:
            accuracies = [(group.name, group.accuracy) for group in self.groups]
            lines.append(_lowest(f"accuracy by {self.group}", accuracies))
        return lines


def read_scores(directory: RunDirectory) -> Scores | None:
    """Return the scores in `scores.json`, if a run has it; a damaged file is a DamagedRunError."""
    content = RunFiles(directory).optional(SCORES)
    try:
        return None if content is None else Scores.model_validate(content)
    except ValidationError as error:
        damage = first_mistake(error, "scores")
        raise DamagedRunError.of(directory.path / SCORES, damage) from error


def _lowest(heading: str, shares: Sequence[tuple[str, float]]) -> str:
    if len(shares) > _MAX_LISTED:
        heading = f"{heading}, lowest"
        shares = sorted(shares, key=lambda share: share[1])[:_NUM_LOWEST]
    return f"{heading}  {', '.join(f'{name}: {recall_text(share)}' for name, share in shares)}"


def recall_text(value: float | None) -> str:
    """Return a recall or a precision as text in percent, or a dash if it is None."""
    if value is None:
        return "–"
    return "0%" if value == 0 else f"{value:.1%}"


def quoted(name: str) -> str:
    """Return the name of a class in quotation marks, or without them if it is a number."""
    return name if name.isdigit() else f"“{name}”"


class RunContents(RunFiles):
    """The files of a finished run, with properties for the values that the report shows."""

    @cached_property
    def client_data(self) -> dict[str, Any] | None:
        """Content of `client_data.json`; None if the run recorded no figures of private data."""
        return self.optional(CLIENT_DATA)

    @cached_property
    def scores(self) -> Scores | None:
        """The scores in `scores.json`; None if the run has no such file."""
        return read_scores(self.directory)

    @cached_property
    def experiment_text(self) -> str:
        """The text of `experiment.yaml`."""
        return read_bytes(self.directory.path / "experiment.yaml").decode(errors="replace")

    @cached_property
    def facts(self) -> Facts:
        """The recorded facts on the run's privacy, on which its privacy statement is based."""
        run = RunFacts(
            status=self.summary["status"],
            rounds=self.summary["rounds"],
            planned_rounds=self.planned_rounds,
            lost_updates=sum(len(row["failed"]) for row in self.rounds),
            absent_clients=absent_clients(self.rounds),
        )
        return read_facts(self.privacy, run=run)

    @property
    def sizes(self) -> dict[str, Any]:
        """Public sizes of data and model in `summary.json`, by name; empty if not recorded."""
        return self.summary.get("sizes") or {}

    @property
    def setup(self) -> dict[str, float]:
        """Seconds of each phase before the rounds, by name; empty if not recorded."""
        return self.summary.get("setup", {})

    @property
    def has_times(self) -> bool:
        """Whether the run recorded times; a run with secret participants of rounds records none."""
        return self.summary["seconds"] > 0 or bool(self.setup)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The final metrics on the test set by name, the main metric first."""
        chosen = section_of(self.settings, "evaluation").get("metrics")
        return self._metrics("test_", chosen if isinstance(chosen, list) else ())

    @property
    def client_metrics(self) -> dict[str, float | None]:
        """The final metrics on clients' held-out examples, by name; empty if the run has none."""
        return self._metrics("clients_")

    def _metrics(self, where: str, chosen: Sequence[Any] = ()) -> dict[str, float | None]:
        """Return metrics in the order of the experiment, or with the task's main metric first."""
        metrics = {name: value for name, value in self.summary.items() if name.startswith(where)}
        names = [metric_key(str(name)) for name in chosen] or ["accuracy", "r2", "mse"]
        order = (*(f"{where}{name}" for name in names), *metrics)
        return {name: metrics[name] for name in order if name in metrics}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings in `experiment.yaml`; empty if the file cannot be read."""
        try:
            settings = parse_plain_yaml(self.experiment_text)
        except FormatError:
            return {}
        return settings if isinstance(settings, dict) else {}

    @property
    def planned_rounds(self) -> int | None:
        """Planned number of rounds; None if `experiment.yaml` cannot be parsed."""
        rounds = section_of(self.settings, "federation").get("rounds")
        return rounds if isinstance(rounds, int) else None


def section_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the settings; empty if the settings lack it."""
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def read_contents(directory: RunDirectory) -> RunContents:
    """Return the content of a run; one without result files raises a RunDirectoryError."""
    contents = RunContents(directory)
    _ = contents.summary, contents.privacy, contents.rounds, contents.environment
    return contents
