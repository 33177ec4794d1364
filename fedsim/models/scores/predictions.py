"""Predictions of a model on a test set, from which metrics are computed.

A single label 0 or 1 is treated as two classes: the logit z of label 1 is the score of class 1, and
the score of class 0 is 0. Softmax of the two scores is the sigmoid of z.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.models.losses import to_columns
from fedsim.models.tasks import Task

Array = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ClassPredictions:
    """The class predictions for n examples, with the true classes.

    Attributes:
        scores: score of each class, float64 (n, classes).
        predicted: the class with the largest score for each example, int64 (n,).
        targets: the true class of each example, int64 (n,).
    """

    scores: Array
    predicted: Counts
    targets: Counts

    @property
    def num_classes(self) -> int:
        """Number of classes for which the model has a score."""
        return self.scores.shape[1]

    @cached_property
    def hits(self) -> Counts:
        """Number of correct predictions for each class, (classes,)."""
        return self._count(self.targets[self.predicted == self.targets])

    @cached_property
    def examples(self) -> Counts:
        """Number of examples of each class, (classes,)."""
        return self._count(self.targets)

    @cached_property
    def predictions(self) -> Counts:
        """Number of times that each class is predicted, (classes,)."""
        return self._count(self.predicted)

    @cached_property
    def probabilities(self) -> Array | None:
        """Softmax of the scores (n, classes); None if a score is not finite."""
        if not np.isfinite(self.scores).all():
            return None
        shifted = np.exp(self.scores - self.scores.max(axis=1, keepdims=True))
        return shifted / shifted.sum(axis=1, keepdims=True)

    def confusion(self) -> Counts:
        """Return the confusion matrix; rows are true classes, columns are predicted classes."""
        size = self.num_classes
        pairs = np.bincount(self.targets * size + self.predicted, minlength=size * size)
        return pairs.reshape(size, size)

    def _count(self, classes: Counts) -> Counts:
        return np.bincount(classes, minlength=self.num_classes)


@dataclass(frozen=True, eq=False)
class LabelPredictions:
    """The predictions of several binary labels for each of n examples, with the true labels.

    Attributes:
        scores: logit of each label, float64 (n, labels).
        predicted: whether each logit is above 0, bool (n, labels).
        targets: whether each true label is 1, bool (n, labels).
    """

    scores: Array
    predicted: NDArray[np.bool_]
    targets: NDArray[np.bool_]

    @cached_property
    def hits(self) -> Counts:
        """Number of examples that have a label and are predicted to have it, (labels,)."""
        return (self.predicted & self.targets).sum(axis=0)

    @cached_property
    def examples(self) -> Counts:
        """Number of examples that have each label, (labels,)."""
        return self.targets.sum(axis=0)

    @cached_property
    def predictions(self) -> Counts:
        """Number of examples that are predicted to have each label, (labels,)."""
        return self.predicted.sum(axis=0)

    @cached_property
    def probabilities(self) -> Array:
        """Sigmoid of the logits, (n, labels)."""
        return 1 / (1 + np.exp(-self.scores))


@dataclass(frozen=True, eq=False)
class NumberPredictions:
    """The predicted numbers for n examples, with the true numbers.

    Attributes:
        predicted: predicted values, float64 (n, k).
        targets: true values, float64 (n, k).
    """

    predicted: Array
    targets: Array


Predictions = ClassPredictions | LabelPredictions | NumberPredictions


def predictions_of(task: Task, outputs: Tensor, targets: Tensor) -> Predictions:
    """Return a model's outputs as predicted classes, labels or numbers, as the task says.

    Args:
        task: the task, which says what the outputs mean.
        outputs: outputs of the model (n, ...), on the CPU.
        targets: targets (n,) or (n, k).
    """
    if task.name == "classification":
        return ClassPredictions(
            outputs.double().numpy(), outputs.argmax(dim=1).numpy(), targets.long().numpy()
        )
    columns, actual = to_columns(outputs, targets, "metrics")
    if task.name == "regression":
        numbers = targets.double().reshape(len(targets), -1)
        return NumberPredictions(columns.double().numpy(), numbers.numpy())
    if columns.shape[1] == 1:
        scores = torch.cat([torch.zeros_like(columns), columns], dim=1)
        chosen, true = (columns[:, 0] > 0).long(), (actual[:, 0] > 0.5).long()
        return ClassPredictions(scores.double().numpy(), chosen.numpy(), true.numpy())
    return LabelPredictions(columns.double().numpy(), (columns > 0).numpy(), (actual > 0.5).numpy())
