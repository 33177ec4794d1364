"""Scores of the final model on the public test set by class: the content of `scores.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.text_formats import finite_or_none
from fedsim.models.scores.classes import precision_per_class, recall_per_class
from fedsim.models.scores.predictions import ClassPredictions, LabelPredictions, Predictions

MAX_CONFUSION_CLASSES = 100  # a larger matrix is left out


def summarise_scores(
    found: Predictions, names: Sequence[str] | None, metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """Return classes, confusion matrix, majority baseline, figures by class, and metrics.

    Args:
        found: predictions on the whole test set.
        names: names of the classes; None: their numbers.
        metrics: the metrics of the last round, by name.
    """
    content: dict[str, Any] = {
        "classes": None,
        "confusion": None,
        "majority": None,
        "by_class": [],
        "metrics": dict(metrics),
    }
    if isinstance(found, ClassPredictions):
        classes = class_names(found.num_classes, names)
        most = int(found.examples.argmax())
        share = float(found.examples[most] / len(found.targets))
        content["classes"] = classes
        content["majority"] = {"class": classes[most], "share": share}
        if found.num_classes <= MAX_CONFUSION_CLASSES:
            content["confusion"] = found.confusion().tolist()
        content["by_class"] = _by_class(found, classes)
    elif isinstance(found, LabelPredictions):
        labels = class_names(found.targets.shape[1], names)
        with_label = found.targets.mean(axis=0)
        share = float(np.maximum(with_label, 1 - with_label).mean())
        content["classes"] = labels
        content["majority"] = {"class": None, "share": share}
        content["by_class"] = _by_class(found, labels)
    return content


def class_names(count: int, names: Sequence[str] | None) -> list[str]:
    """Return one name for each class; a class without a name has its number.

    Args:
        count: number of classes.
        names: the names that the data give; None: none.
    """
    known = list(names or ())[:count]
    return known + [str(number) for number in range(len(known), count)]


def _by_class(found: ClassPredictions | LabelPredictions, names: list[str]) -> list[dict[str, Any]]:
    """Return the figures of each class; null where there is nothing to divide by."""
    rows = zip(
        names,
        _whole(found.examples),
        _whole(found.predictions),
        recall_per_class(found),
        precision_per_class(found),
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


def _whole(counts: NDArray[np.int64]) -> list[int]:
    return [int(count) for count in counts]
