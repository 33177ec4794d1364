"""The metrics that an experiment chooses, and the content of the result file `scores.json`.

Both are computed on the whole test set. Regression metrics follow the definitions of scikit-learn,
as means over the columns of the targets.
"""

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.core.metrics import METRICS, metric_key, wrong_task
from fedsim.core.plugins import plugin_calls, resolve
from fedsim.core.text_formats import finite_or_none
from fedsim.models.catalog import MetricError
from fedsim.models.scores.classes import FUNCTIONS, precision_per_class, recall_per_class
from fedsim.models.scores.predictions import (
    Array,
    ClassPredictions,
    LabelPredictions,
    NumberPredictions,
    Predictions,
    predictions_of,
)
from fedsim.models.tasks import Task

MetricValue = float | list[float]
OwnMetric = Callable[[Tensor, Tensor], Any]


def rmse(predictions: NumberPredictions) -> float:
    """Return the root of the mean squared error of each target column, averaged over columns."""
    return float(np.sqrt(np.square(_errors(predictions)).mean(axis=0)).mean())


def mae(predictions: NumberPredictions) -> float:
    """Return the mean absolute error over all examples and target columns."""
    return float(np.abs(_errors(predictions)).mean())


def median_absolute_error(predictions: NumberPredictions) -> float:
    """Return the median absolute error of each target column, averaged over columns."""
    return float(np.median(np.abs(_errors(predictions)), axis=0).mean())


def max_error(predictions: NumberPredictions) -> float:
    """Return the largest absolute error over all examples and target columns."""
    return float(np.abs(_errors(predictions)).max())


def explained_variance(predictions: NumberPredictions) -> float:
    """Return 1 - var(errors) / var(targets) of each target column, averaged over columns.

    The value of a column with constant targets is 1 if its errors are constant, else 0.
    """
    rest = _errors(predictions).var(axis=0)
    spread = predictions.targets.var(axis=0)
    values = np.where(rest == 0, 1.0, 0.0)
    values[spread > 0] = 1 - rest[spread > 0] / spread[spread > 0]
    return float(values.mean())


def _errors(predictions: NumberPredictions) -> Array:
    return predictions.targets - predictions.predicted


# `Task.metrics` computes accuracy, mse and r2 batch by batch.
_FUNCTIONS: dict[str, Callable[[Any], MetricValue]] = {
    **FUNCTIONS,
    "rmse": rmse,
    "mae": mae,
    "median_absolute_error": median_absolute_error,
    "max_error": max_error,
    "explained_variance": explained_variance,
}


@dataclass(frozen=True)
class ChosenMetrics:
    """The metrics that the setting `evaluation.metrics` names, with the code to compute them.

    Attributes:
        names: names of the metrics, in the order of the experiment file.
        functions: the functions of user-defined metrics, by name.
        task: the task, which says what the outputs mean.
    """

    names: tuple[str, ...]
    functions: Mapping[str, OwnMetric]
    task: Task

    def __call__(
        self, known: Mapping[str, float], outputs: Tensor, targets: Tensor
    ) -> dict[str, MetricValue]:
        """Return the values of the metrics by their names in files, in the order of `names`.

        Args:
            known: metrics of the task that are already computed (`Task.metrics`).
            outputs: the model's outputs on the whole test set (n, ...), on the CPU.
            targets: the targets of the test set, (n,) or (n, k).

        Raises:
            MetricError: a user-defined metric fails, or a metric does not fit the targets.
        """
        predictions = predictions_of(self.task, outputs, targets)
        values: dict[str, MetricValue] = {}
        for name in self.names:
            if name in self.functions:
                values[metric_key(name)] = _own_value(name, self.functions[name], outputs, targets)
            elif name in known:
                values[name] = known[name]
            else:
                values[name] = _built_in_value(name, predictions)
        return values


def choose_metrics(names: Sequence[str], task: Task, *, base: Path) -> ChosenMetrics:
    """Return the metrics that an experiment names, after checking that they fit the task.

    Args:
        names: the setting `evaluation.metrics`: built-in names, `package.module:function` or
            `./file.py:function`.
        task: the task, which says what the outputs mean.
        base: the directory of the experiment file.

    Raises:
        MetricError: a metric cannot score the task.
        PluginError: a function cannot be found or loaded.
    """
    functions = {}
    for name in names:
        if ":" in name:
            functions[name] = resolve(name, base=base, setting="evaluation.metrics")
        elif (problem := wrong_task(name, task.name)) is not None:
            raise MetricError(f"evaluation.metrics: {problem}")
    return ChosenMetrics(tuple(names), functions, task)


def _built_in_value(name: str, predictions: Predictions) -> MetricValue:
    if isinstance(predictions, LabelPredictions) and not METRICS[name].several_labels:
        possible = ", ".join(other for other, entry in METRICS.items() if entry.several_labels)
        raise MetricError(
            f"evaluation.metrics: {name} scores one label, and an example has "
            f"{predictions.targets.shape[1]}; choose from {possible}, or a function of your own"
        )
    return _FUNCTIONS[name](predictions)


def _own_value(name: str, function: OwnMetric, outputs: Tensor, targets: Tensor) -> float:
    where = f"evaluation.metrics {name!r}"
    fix = (
        f"it is called with outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} of "
        "the whole public test set, and must return one number"
    )
    with plugin_calls(f"{where}: failed", raises=MetricError, fix=fix):
        value = function(outputs.clone(), targets.clone())
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise MetricError(f"{where}: must return one number, got {type(value).__name__}{shape}")


MAX_CONFUSION_CLASSES = 100  # a larger matrix is left out


def summarise_scores(
    predictions: Predictions, names: Sequence[str] | None, metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of `scores.json`: metrics, confusion matrix, and results of each class.

    Args:
        predictions: predictions on the whole test set.
        names: names of the classes; None names them by their numbers.
        metrics: the metrics of the last round, by name.
    """
    content: dict[str, Any] = {
        "classes": None,
        "confusion": None,
        "majority": None,
        "by_class": [],
        "metrics": dict(metrics),
    }
    if isinstance(predictions, NumberPredictions):
        return content
    labels = class_names(predictions.scores.shape[1], names)
    content |= {"classes": labels, "by_class": _by_class(predictions, labels)}
    if isinstance(predictions, LabelPredictions):
        with_label = predictions.targets.mean(axis=0)
        share = float(np.maximum(with_label, 1 - with_label).mean())
        content["majority"] = {"class": None, "share": share}
        return content
    most = int(predictions.examples.argmax())
    share = float(predictions.examples[most] / len(predictions.targets))
    content["majority"] = {"class": labels[most], "share": share}
    if predictions.num_classes <= MAX_CONFUSION_CLASSES:
        content["confusion"] = predictions.confusion().tolist()
    return content


def class_names(count: int, names: Sequence[str] | None) -> list[str]:
    """Return one name for each class; a class without a name gets its number.

    Args:
        count: number of classes.
        names: the names in the data; None if the data have no names.
    """
    known = list(names or ())[:count]
    return known + [str(number) for number in range(len(known), count)]


def _by_class(
    counted: ClassPredictions | LabelPredictions, names: list[str]
) -> list[dict[str, Any]]:
    """Return the figures of each class; recall or precision is None if its divisor is 0."""
    rows = zip(
        names,
        counted.examples.tolist(),
        counted.predictions.tolist(),
        recall_per_class(counted),
        precision_per_class(counted),
        strict=True,
    )
    return [
        {
            "class": name,
            "examples": examples,
            "predicted": predicted,
            "recall": finite_or_none(recall),
            "precision": finite_or_none(precision),
        }
        for name, examples, predicted, recall, precision in rows
    ]
