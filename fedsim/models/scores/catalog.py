"""The built-in metrics by name, without importing torch or numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TaskName = Literal["classification", "labels", "regression"]

TASK_OF_LOSS: dict[str, TaskName] = {
    "cross_entropy": "classification",
    "bce": "labels",
    "mse": "regression",
}
TASK_WORDS: dict[TaskName, str] = {
    "classification": "classes",
    "labels": "labels 0 and 1",
    "regression": "numbers",
}


@dataclass(frozen=True)
class MetricEntry:
    """A built-in metric.

    Attributes:
        description: its line in `fedsim list`, with the function of scikit-learn that defines it.
        tasks: the tasks that it scores.
        several_labels: whether it scores several labels of one example.
        per_class: whether it is a list, with one number for each class or label.
    """

    description: str
    tasks: tuple[TaskName, ...]
    several_labels: bool = False
    per_class: bool = False


def _classes(description: str, *, several: bool = False, each: bool = False) -> MetricEntry:
    return MetricEntry(description, ("classification", "labels"), several, each)


def _numbers(description: str) -> MetricEntry:
    return MetricEntry(description, ("regression",))


METRICS: dict[str, MetricEntry] = {
    "accuracy": _classes(
        "share of correct predictions, over all labels (accuracy_score)", several=True
    ),
    "balanced_accuracy": _classes(
        "mean recall of the classes in the test set (balanced_accuracy_score)"
    ),
    "f1": _classes(
        "F1 of class 1; of three classes or more, or several labels, their mean (f1_score)",
        several=True,
    ),
    "precision": _classes("precision, averaged as f1 is (precision_score)", several=True),
    "recall": _classes("recall, averaged as f1 is (recall_score)", several=True),
    "f1_macro": _classes("mean F1 of all classes (f1_score, macro)", several=True),
    "f1_weighted": _classes(
        "mean F1 of all classes, weighted by examples (f1_score, weighted)", several=True
    ),
    "auc": _classes(
        "area under the ROC curve of class 1; of more classes, the mean of each against the rest "
        "(roc_auc_score)",
        several=True,
    ),
    "average_precision": _classes(
        "average precision of class 1; of more, the mean of each against the rest "
        "(average_precision_score)",
        several=True,
    ),
    "log_loss": _classes("mean -ln of the true class's probability (log_loss)"),
    "mcc": _classes("Matthews correlation coefficient (matthews_corrcoef)"),
    "kappa": _classes("Cohen's kappa of predictions and targets (cohen_kappa_score)"),
    "top_3_accuracy": _classes("share of targets among the 3 best (top_k_accuracy_score)"),
    "top_5_accuracy": _classes("share of targets among the 5 best (top_k_accuracy_score)"),
    "recall_per_class": _classes(
        "recall of each class or label (recall_score)", several=True, each=True
    ),
    "precision_per_class": _classes(
        "precision of each class or label (precision_score)", several=True, each=True
    ),
    "f1_per_class": _classes("F1 of each class or label (f1_score)", several=True, each=True),
    "mse": _numbers("mean squared error (mean_squared_error)"),
    "rmse": _numbers("root of the mean squared error (root_mean_squared_error)"),
    "mae": _numbers("mean absolute error (mean_absolute_error)"),
    "median_absolute_error": _numbers("median absolute error (median_absolute_error)"),
    "max_error": _numbers("largest absolute error of any target"),
    "r2": _numbers("coefficient of determination R² (r2_score)"),
    "explained_variance": _numbers("share of the explained variance (explained_variance_score)"),
}

LOSS = "loss"  # always computed, first in every row


def metric_key(name: str) -> str:
    """Return the name of a metric in files: of a function of your own, that of the function."""
    return name.rpartition(":")[2].replace(".", "_")


def computed_metrics(loss: str, chosen: Sequence[str] | None) -> tuple[str, ...]:
    """Return the metrics of a run that are one number: the loss, then the main one first.

    Edge case: with a loss of the user's own and no chosen metrics the task is not known, and
    nothing is returned.

    Args:
        loss: `model.loss`.
        chosen: `evaluation.metrics`; None: the metrics of the task.
    """
    if chosen is None:
        task = TASK_OF_LOSS.get(loss)
        own = ("r2", "mse") if task == "regression" else ("accuracy",)
        return () if task is None else (LOSS, *own)
    keys = [metric_key(name) for name in chosen]
    return (LOSS, *(key for key in keys if key not in METRICS or not METRICS[key].per_class))


def wrong_task(name: str, task: TaskName) -> str | None:
    """Return why a built-in metric cannot score a task, or None.

    Args:
        name: a key of `METRICS`.
        task: the task of the loss.
    """
    if task in METRICS[name].tasks:
        return None
    possible = ", ".join(each for each, entry in METRICS.items() if task in entry.tasks)
    wanted = " or ".join(TASK_WORDS[each] for each in METRICS[name].tasks)
    return (
        f"{name} scores {wanted}, and this model predicts {TASK_WORDS[task]}; choose from "
        f"{possible}, or a function of your own"
    )
