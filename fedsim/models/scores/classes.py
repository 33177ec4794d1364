"""Metrics of classes and labels, by the definitions of scikit-learn.

fedsim does not call scikit-learn, because its import takes longer than a round. The tests compare
each metric with the scikit-learn function that the metric's catalogue entry names.

In a metric with one value per class, the value of a class is NaN if scikit-learn defines none.
Examples are the recall of a class without examples, and the F1 of a class that is neither in the
test set nor predicted. Areas under curves are means over the classes for which the test set has
both positive and negative examples.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.models.scores.predictions import Array, ClassPredictions, Counts, LabelPredictions

Counted = ClassPredictions | LabelPredictions
_NONE = float("nan")
_SMALLEST = np.finfo(np.float64).eps  # smaller probabilities are raised to it, as in log_loss


def accuracy(predictions: ClassPredictions) -> float:
    """Return the share of correct predictions."""
    return float(predictions.hits.sum() / len(predictions.targets))


def balanced_accuracy(predictions: ClassPredictions) -> float:
    """Return the mean recall over the classes that occur in the test set."""
    there = predictions.examples > 0
    return float((predictions.hits[there] / predictions.examples[there]).mean())


def recall_per_class(predictions: Counted) -> list[float]:
    """Return the recall of each class: the share of its examples that are predicted correctly."""
    return _ratio(predictions.hits, predictions.examples, empty=_NONE).tolist()


def precision_per_class(predictions: Counted) -> list[float]:
    """Return the precision of each class: the share of its predictions that are correct."""
    return _ratio(predictions.hits, predictions.predictions, empty=_NONE).tolist()


def f1_per_class(predictions: Counted) -> list[float]:
    """Return the F1 of each class: the harmonic mean of precision and recall."""
    return _f1(predictions, empty=_NONE).tolist()


def recall(predictions: Counted) -> float:
    """Return the recall of class 1 if there are two classes, otherwise the mean over classes."""
    return _class_1_or_mean(predictions, _ratio(predictions.hits, predictions.examples))


def precision(predictions: Counted) -> float:
    """Return the precision of class 1 if there are two classes, otherwise the mean over classes."""
    return _class_1_or_mean(predictions, _ratio(predictions.hits, predictions.predictions))


def f1(predictions: Counted) -> float:
    """Return the F1 of class 1 if there are two classes, otherwise the mean over classes."""
    return _class_1_or_mean(predictions, _f1(predictions))


def f1_macro(predictions: Counted) -> float:
    """Return the mean F1 over all classes that occur in the test set or are predicted."""
    return _mean(predictions, _f1(predictions))


def f1_weighted(predictions: Counted) -> float:
    """Return the mean F1 over all classes, weighted by the classes' numbers of examples."""
    total = predictions.examples.sum()
    return float((_f1(predictions) * predictions.examples).sum() / total) if total else 0.0


def auc(predictions: Counted) -> float:
    """Return the area under the ROC curve.

    For more than two classes it is the mean over the classes, each against all others. For binary
    labels it is the mean over the labels.
    """
    return _one_against_rest(predictions, _area_under_roc)


def average_precision(predictions: Counted) -> float:
    """Return the average precision.

    For more than two classes it is the mean over the classes, each against all others. For binary
    labels it is the mean over the labels.
    """
    return _one_against_rest(predictions, _average_precision)


def log_loss(predictions: ClassPredictions) -> float:
    """Return the mean of -ln(probability of the true class) over all examples."""
    if predictions.probabilities is None:
        return _NONE
    true = predictions.probabilities[np.arange(len(predictions.targets)), predictions.targets]
    return float(-np.log(np.maximum(true, _SMALLEST)).mean())


def matthews(predictions: ClassPredictions) -> float:
    """Return the Matthews correlation; 0 if all targets or all predictions are of one class."""
    n, correct = len(predictions.targets), float(predictions.hits.sum())
    true, chosen = predictions.examples.astype(float), predictions.predictions.astype(float)
    covariance = correct * n - true @ chosen
    spread = (n**2 - chosen @ chosen) * (n**2 - true @ true)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def kappa(predictions: ClassPredictions) -> float:
    """Return Cohen's kappa of targets and predictions; NaN if both have the same single class."""
    n = len(predictions.targets)
    by_chance = predictions.examples.astype(float) @ predictions.predictions / n**2
    return float((accuracy(predictions) - by_chance) / (1 - by_chance)) if by_chance < 1 else _NONE


def top_accuracy(predictions: ClassPredictions, k: int) -> float:
    """Return the share of examples whose true class is among the `k` classes of largest score."""
    if not np.isfinite(predictions.scores).all():
        return _NONE
    best = np.argsort(predictions.scores, axis=1, kind="stable")[:, ::-1][:, :k]
    return float((best == predictions.targets[:, None]).any(axis=1).mean())


def _ratio(parts: Counts, wholes: Counts, *, empty: float = 0.0) -> Array:
    result = np.full(len(wholes), empty)
    return np.divide(parts, wholes, out=result, where=wholes > 0)


def _f1(counted: Counted, *, empty: float = 0.0) -> Array:
    return _ratio(2 * counted.hits, counted.examples + counted.predictions, empty=empty)


def _class_1_or_mean(counted: Counted, values: Array) -> float:
    if isinstance(counted, ClassPredictions) and counted.num_classes == 2:
        return float(values[1])
    return _mean(counted, values)


def _mean(counted: Counted, values: Array) -> float:
    """Return the mean over all labels, or over the classes that occur or are predicted."""
    if isinstance(counted, LabelPredictions):
        return float(values.mean())
    return float(values[(counted.examples > 0) | (counted.predictions > 0)].mean())


def _one_against_rest(counted: Counted, area: Callable[[NDArray[np.bool_], Array], float]) -> float:
    if isinstance(counted, LabelPredictions):
        pairs = list(zip(counted.targets.T, counted.scores.T, strict=True))
        if not np.isfinite(counted.scores).all():
            return _NONE
    elif counted.probabilities is None:
        return _NONE
    elif counted.num_classes == 2:
        pairs = [(counted.targets == 1, counted.scores[:, 1] - counted.scores[:, 0])]
    else:
        columns = counted.probabilities.T
        pairs = [(counted.targets == number, column) for number, column in enumerate(columns)]
    areas = [area(true, scores) for true, scores in pairs if true.any() and not true.all()]
    return float(np.mean(areas)) if areas else _NONE


def _area_under_roc(true: NDArray[np.bool_], scores: Array) -> float:
    """Return the share of pairs (positive, negative) in the right order; a tie counts half."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # examples in a tie get its mean rank
    positives = int(true.sum())
    wins = ranks[true].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * (len(true) - positives)))


def _average_precision(true: NDArray[np.bool_], scores: Array) -> float:
    """Return the sum of precisions at each threshold, weighted by the increase of recall."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)  # the last example of each tie
    positives = np.cumsum(true[order])[last]
    precisions = positives / (np.flatnonzero(last) + 1)
    return float((np.diff(positives, prepend=0) * precisions).sum() / true.sum())


FUNCTIONS: Mapping[str, Callable[[Any], float | list[float]]] = {
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "precision": precision,
    "recall": recall,
    "f1_macro": f1_macro,
    "f1_weighted": f1_weighted,
    "auc": auc,
    "average_precision": average_precision,
    "log_loss": log_loss,
    "mcc": matthews,
    "kappa": kappa,
    "top_3_accuracy": partial(top_accuracy, k=3),
    "top_5_accuracy": partial(top_accuracy, k=5),
    "recall_per_class": recall_per_class,
    "precision_per_class": precision_per_class,
    "f1_per_class": f1_per_class,
}
"""The function of each metric of classes or labels, by the metric's name in `METRICS`."""
