"""Reading of the inputs of a trained model from a file, in the same way as a run reads its data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data.examples import DataError, to_dataset
from fedsim.data.file_names import TABLE_SUFFIXES, quoted
from fedsim.data.files import array_names, check_file, read_npz
from fedsim.data.settings import DataSettings, FileDataset
from fedsim.data.tables.column import texts_of
from fedsim.data.tables.dataset import open_table, read_part, targets_of

DEFAULT_TARGET = "y"
"""Name of the target in a file of inputs if the run's dataset is not a file."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The examples for which a trained model makes predictions.

    Attributes:
        features: float32 (n, ...), or int64 (n, ...) for tokens, before the transforms of
            `model.features`.
        targets: int64 (n,), float32 (n,) or float32 (n, k); None if the file has no targets.
        kept: text columns (n,) by name that are not features, such as an id. They identify the
            examples in a table of predictions.
    """

    features: NDArray[np.float32] | NDArray[np.int64]
    targets: NDArray[np.int64] | NDArray[np.float32] | None
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)


def read_inputs(
    settings: DataSettings,
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
) -> Inputs:
    """Return the examples of a file, with or without targets, as inputs of a run's model.

    Args:
        settings: the section `data` of the run's experiment.
        path: a .npz, .csv or .parquet file.
        columns: `FederatedData.columns` of the run: names of the table columns that are features,
            in the order of the model's inputs. None (data without a table) takes all columns but
            the target.
        class_names: `FederatedData.class_names` of the run, which give each text target its class
            number. None takes the sorted classes of the file.

    Raises:
        DataError: the file cannot be read, or lacks a column of the model.
    """
    check_file(path)
    dataset = settings.dataset
    if not isinstance(dataset, FileDataset):
        dataset = FileDataset(target=DEFAULT_TARGET)
    if path.suffix.lower() in TABLE_SUFFIXES:
        inputs = _table_inputs(settings, dataset, path, columns, class_names)
    else:
        inputs = _archive_inputs(settings, dataset.target, path, class_names)
    if not len(inputs.features):
        raise DataError(f"{path}: no rows; add the examples to predict")
    return inputs


def _archive_inputs(
    settings: DataSettings, target: str, path: Path, class_names: Sequence[str] | None
) -> Inputs:
    has_target = {target, f"{target}_train", f"train_{target}"} & set(array_names(path))
    tokens, images = settings.features == "tokens", settings.images
    data = read_npz(path, target if has_target else None, tokens=tokens, images=images)
    x, y, names = data.train.features, data.train.targets, data.class_names
    if names is not None and class_names is not None:
        texts = [names[number] for number in y.tolist()]
        y = _numbered(texts, class_names, lambda row: f"{path}: example {row}", target)
    return Inputs(x, y if has_target else None)


def _table_inputs(
    settings: DataSettings,
    dataset: FileDataset,
    path: Path,
    columns: Sequence[str] | None,
    class_names: Sequence[str] | None,
) -> Inputs:
    tokens = settings.features == "tokens"
    table = open_table(path, dataset)
    if columns is None:
        columns = [name for name in table.names if name != dataset.target]
    kept = [name for name in table.names if name not in {*columns, dataset.target}]
    part = read_part(table, dataset, columns, texts=kept, tokens=tokens)
    if part.mistakes:
        raise DataError("\n".join(part.mistakes.values()))
    if part.targets is None or not any(texts_of(part.targets)):
        blank = np.zeros(len(part.features), np.int64)
        data = to_dataset(part.features, blank, tokens=tokens)
        return Inputs(data.train.features, None, part.texts)
    targets, _ = targets_of([part], dataset)
    if isinstance(targets, list) and class_names is not None:
        targets = _numbered(targets, class_names, part.where, dataset.target)
    data = to_dataset(part.features, targets, tokens=tokens)
    return Inputs(data.train.features, data.train.targets, part.texts)


def _numbered(
    targets: Sequence[str], names: Sequence[str], where: Callable[[int], str], column: str
) -> NDArray[np.int64]:
    """Return text targets as the class numbers of the run."""
    numbers = {name: number for number, name in enumerate(names)}
    for row, target in enumerate(targets):
        if target not in numbers:
            raise DataError(
                f"{where(row)}: column {column!r}: {target!r} is no class of the model; it has "
                f"{quoted(names[:10])}"
            )
    return np.array([numbers[target] for target in targets], np.int64)
