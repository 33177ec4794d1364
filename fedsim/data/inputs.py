"""Inputs of a trained model from a file: read and transformed as a run reads its data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data.files import read_file
from fedsim.data.settings import DataSettings, FileDataset

DEFAULT_TARGET = "y"


@dataclass(frozen=True, eq=False)
class Inputs:
    """Examples to predict.

    Attributes:
        features: float32 (n, ...), or int64 (n, ...) for tokens; as a run has them before
            `model.features`.
        targets: int64 (n,), float32 (n,) or float32 (n, k); None where the file has no target.
        kept: columns that are no features, such as an id, as text (n,) each; they identify the
            examples in a table of predictions.
    """

    features: NDArray[np.float32] | NDArray[np.int64]
    targets: NDArray[np.int64] | NDArray[np.float32] | None
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)


def read_inputs(
    settings: DataSettings,
    path: Path,
    *,
    base: Path,
    columns: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
) -> Inputs:
    """Return the examples of a file, with or without targets, for a model of these data.

    Args:
        settings: `data:` of the run's experiment.
        path: a .npz, .csv or .parquet file.
        base: the directory in which relative paths of the experiment start.
        columns: `FederatedData.columns` of the run: the columns of a table that are features, in
            the order of the model's inputs; None: as the file of the experiment has them.
        class_names: `FederatedData.class_names` of the run, which number the classes of text
            targets; None: the classes of the file, sorted.

    Raises:
        DataError: the file cannot be read, or lacks a column of the model.
    """
    del base, columns, class_names
    target = settings.dataset.target if isinstance(settings.dataset, FileDataset) else "y"
    tokens = settings.features == "tokens"
    dataset = read_file(path, target, tokens=tokens, images=settings.images)
    return Inputs(dataset.train.features, dataset.train.targets)
