"""Catalogue of the built-in metrics: unit and bounds of each, and whether larger is better.

The module can be imported without torch and numpy. A new metric is added here, and its function in
`fedsim/models/scores/`: in `classes.py`, or for numbers in `metrics.py`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
    """Properties of one metric: tasks, unit and bounds, and whether larger is better.

    Attributes:
        description: the metric's line in `fedsim list`, with the scikit-learn function that defines
            the metric.
        tasks: the kinds of prediction that the metric can score, such as regression.
        several_labels: whether the metric scores several labels of one example.
        per_class: whether the value is a list, with one number for each class or label.
        in_percent: whether the value is shown in percent; other metrics have the unit of the
            targets, or no unit.
        smaller_is_better: whether a smaller value is better.
        bounds: the smallest and the largest possible value.
        words: the metric's name in texts for people. "" means that its key is shown, with spaces.
        constant: the metric's value for the best constant prediction; None if this value depends on
            the targets.
        one_class_is_constant: whether a model that always predicts one class counts as a constant
            prediction; for metrics of predicted classes without a known value of `constant`.
    """

    description: str
    tasks: tuple[TaskName, ...]
    several_labels: bool = False
    per_class: bool = False
    in_percent: bool = False
    smaller_is_better: bool = False
    bounds: tuple[float, float] = (-math.inf, math.inf)
    words: str = ""
    constant: float | None = None
    one_class_is_constant: bool = False


_classes = partial(MetricEntry, tasks=("classification", "labels"), bounds=(0.0, 1.0))
_error = partial(MetricEntry, smaller_is_better=True, bounds=(0.0, math.inf))
_number_error = partial(_error, tasks=("regression",))
_fit = partial(MetricEntry, tasks=("regression",), bounds=(-math.inf, 1.0), constant=0.0)

GROUP_ACCURACY = "group_accuracy"  # of the groups of `evaluation.group`

METRICS: dict[str, MetricEntry] = {
    "accuracy": _classes(
        "share of correct predictions, over all labels (accuracy_score)",
        several_labels=True,
        in_percent=True,
    ),
    "balanced_accuracy": _classes(
        "mean recall of the classes in the test set (balanced_accuracy_score)", in_percent=True
    ),
    GROUP_ACCURACY: _classes(
        "mean of the groups' accuracies, of evaluation.group, where each group counts alike",
        several_labels=True,
        in_percent=True,
    ),
    "f1": _classes(
        "F1 of class 1; of three classes or more, or several labels, their mean (f1_score)",
        several_labels=True,
        one_class_is_constant=True,
    ),
    "precision": _classes(
        "precision, averaged as f1 is (precision_score)",
        several_labels=True,
        one_class_is_constant=True,
    ),
    "recall": _classes(
        "recall, averaged as f1 is (recall_score)", several_labels=True, one_class_is_constant=True
    ),
    "f1_macro": _classes(
        "mean F1 of all classes (f1_score, macro)", several_labels=True, one_class_is_constant=True
    ),
    "f1_weighted": _classes(
        "mean F1 of all classes, weighted by examples (f1_score, weighted)",
        several_labels=True,
        one_class_is_constant=True,
    ),
    "auc": _classes(
        "area under the ROC curve of class 1; of more classes, the mean of each against the rest "
        "(roc_auc_score)",
        several_labels=True,
        constant=0.5,
    ),
    "average_precision": _classes(
        "average precision of class 1; of more, the mean of each against the rest "
        "(average_precision_score)",
        several_labels=True,
    ),
    "log_loss": _error(
        "mean -ln of the true class's probability (log_loss)", tasks=("classification", "labels")
    ),
    "mcc": _classes(
        "Matthews correlation coefficient (matthews_corrcoef)", bounds=(-1.0, 1.0), constant=0.0
    ),
    "kappa": _classes(
        "Cohen's kappa of predictions and targets (cohen_kappa_score)",
        bounds=(-1.0, 1.0),
        constant=0.0,
    ),
    "top_3_accuracy": _classes(
        "share of targets among the 3 best (top_k_accuracy_score)", in_percent=True
    ),
    "top_5_accuracy": _classes(
        "share of targets among the 5 best (top_k_accuracy_score)", in_percent=True
    ),
    "recall_per_class": _classes(
        "recall of each class or label (recall_score)", several_labels=True, per_class=True
    ),
    "precision_per_class": _classes(
        "precision of each class or label (precision_score)", several_labels=True, per_class=True
    ),
    "f1_per_class": _classes(
        "F1 of each class or label (f1_score)", several_labels=True, per_class=True
    ),
    "mse": _number_error("mean squared error (mean_squared_error)", words="mean squared error"),
    "rmse": _number_error("root of the mean squared error (root_mean_squared_error)"),
    "mae": _number_error("mean absolute error (mean_absolute_error)"),
    "median_absolute_error": _number_error("median absolute error (median_absolute_error)"),
    "max_error": _number_error("largest absolute error of any target"),
    "r2": _fit("coefficient of determination R² (r2_score)", words="R²"),
    "explained_variance": _fit("share of the explained variance (explained_variance_score)"),
}

LOSS = "loss"  # always computed, first in every row
_LOSS = _error("mean of `model.loss`", tasks=tuple(TASK_WORDS))
_PREFIX = re.compile("^(test|train|clients?|personal)_")


def metric_key(name: str) -> str:
    """Return the name of a metric in result files; for your own function, the function's name."""
    return name.rpartition(":")[2].replace(".", "_")


def metric_entry(name: str) -> MetricEntry:
    """Return the properties of a metric: its unit and bounds, and whether larger is better.

    For a function of your own only the name is known. A name that ends in `accuracy` then has the
    properties of the built-in accuracy. Any other name has no bounds, and larger is better.

    Args:
        name: the metric's name in result files: `accuracy`, `test_accuracy`, `client_accuracy`.
    """
    short = _PREFIX.sub("", name)
    if short == LOSS:
        return _LOSS
    own_function = (
        METRICS["accuracy"] if short.endswith("accuracy") else MetricEntry("your own", ())
    )
    return METRICS.get(short, own_function)


def metric_name(name: str) -> str:
    """Return a metric's name in texts for people, such as R² for `test_r2`."""
    short = _PREFIX.sub("", name)
    return metric_entry(short).words or short.replace("_", " ")


def computed_metrics(loss: str, chosen: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of a run's scalar metrics: the loss, the main metric, then any others.

    Edge cases: with a loss function of your own and no chosen metrics the task is unknown. The
    result is then empty.

    Args:
        loss: the setting `model.loss`.
        chosen: the setting `evaluation.metrics`; None stands for the metrics of the task.
    """
    if chosen is None:
        task = TASK_OF_LOSS.get(loss)
        default_metrics = ("r2", "mse") if task == "regression" else ("accuracy",)
        return () if task is None else (LOSS, *default_metrics)
    keys = [metric_key(name) for name in chosen]
    return (LOSS, *(key for key in keys if key not in METRICS or not METRICS[key].per_class))


def wrong_task(name: str, task: TaskName) -> str | None:
    """Return an error message if a built-in metric cannot score a task; None if it can.

    Args:
        name: a key of `METRICS`.
        task: the kind of prediction that the model's loss trains, such as regression.
    """
    if task in METRICS[name].tasks:
        return None
    possible = ", ".join(other for other, entry in METRICS.items() if task in entry.tasks)
    wanted = " or ".join(TASK_WORDS[kind] for kind in METRICS[name].tasks)
    return (
        f"{name} scores {wanted}, and this model predicts {TASK_WORDS[task]}; choose from "
        f"{possible}, or a function of your own"
    )
