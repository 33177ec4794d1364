"""Metrics of predicted numbers, by the definitions of scikit-learn; means over the columns."""

import numpy as np

from fedsim.models.scores.predictions import Array, NumberPredictions


def rmse(found: NumberPredictions) -> float:
    """Return the mean over columns of the root of the mean squared error."""
    return float(np.sqrt(np.square(_errors(found)).mean(axis=0)).mean())


def mae(found: NumberPredictions) -> float:
    """Return the mean absolute error."""
    return float(np.abs(_errors(found)).mean())


def median_absolute_error(found: NumberPredictions) -> float:
    """Return the mean over columns of the median absolute error."""
    return float(np.median(np.abs(_errors(found)), axis=0).mean())


def max_error(found: NumberPredictions) -> float:
    """Return the largest absolute error of any column."""
    return float(np.abs(_errors(found)).max())


def explained_variance(found: NumberPredictions) -> float:
    """Return 1 - variance of the errors / variance of the targets; of a constant column 1 or 0."""
    rest = _errors(found).var(axis=0)
    spread = found.targets.var(axis=0)
    values = np.where(rest == 0, 1.0, 0.0)
    values[spread > 0] = 1 - rest[spread > 0] / spread[spread > 0]
    return float(values.mean())


def _errors(found: NumberPredictions) -> Array:
    return found.targets - found.predicted
