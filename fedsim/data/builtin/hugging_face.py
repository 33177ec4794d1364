"""Loading of Hugging Face datasets by the package flwr-datasets, from a folder or by name.

A folder is read without network access. The library looks a name up in its local cache or on the
hub; `HF_HUB_OFFLINE=1` restricts it to the cache.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.plugin_errors import plugin_calls
from fedsim.data.catalog import HuggingFaceArgs
from fedsim.data.examples import DataError, Dataset, to_dataset
from fedsim.data.settings import LoadContext


def load_hugging_face(args: HuggingFaceArgs, context: LoadContext) -> Dataset:
    """Return a Hugging Face dataset, including the column that divides it among clients.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: flwr-datasets is not installed, the dataset cannot be read, or a split or column
            is missing or has values of another form.
    """
    train = _split(args, context, args.train)
    groups: dict[str, tuple[str, ...]] = {}
    if context.group is not None:
        clients = _columns(train, [context.group], args.train)[context.group].tolist()
        if any(client is None or client != client for client in clients):
            raise DataError(
                f"data.partition.column: {context.group!r} names the client of each row, and some "
                f"rows of split {args.train!r} have none; remove such rows"
            )
        groups[context.group] = tuple(map(str, clients))
    features = _feature_columns(args, train, context.group)
    columns = _columns(train, [*features, args.target], args.train)
    parts = [_stack(columns, features), columns[args.target]]
    if args.test is not None:
        test = _columns(_split(args, context, args.test), [*features, args.target], args.test)
        parts += [_stack(test, features), test[args.target]]
    dataset = to_dataset(*parts, images=context.images)
    names = getattr(train.features[args.target], "names", None)
    if names is not None:
        dataset = dataset._replace(class_names=tuple(map(str, names)))
    return dataset._replace(groups=groups)


def _split(args: HuggingFaceArgs, context: LoadContext, split: str) -> Any:
    if find_spec("flwr_datasets") is None:
        raise DataError(
            "data.dataset: huggingface needs flwr-datasets; install it with "
            "pip install 'fedsim-dp[datasets]'"
        )
    from flwr_datasets import FederatedDataset

    where, place = f"data.args.name {args.name!r}", str(args.name)
    if args.path is not None:
        place = str(context.folder(args.path))
        where = f"data.args.path: {place}"
        if not Path(place).is_dir():
            raise DataError(f"{where}: no such folder; it is relative to the experiment file")
    elif Path(place).exists():
        raise DataError(
            f"{where}: {Path.cwd()} has this name too, and it would be read: name a path"
        )
    options: dict[str, Any] = {} if args.revision is None else {"revision": args.revision}
    with plugin_calls(f"{where}: split {split!r} cannot be read", raises=DataError):
        return FederatedDataset(
            dataset=place, subset=args.subset, partitioners={}, shuffle=False, **options
        ).load_split(split)


def _feature_columns(args: HuggingFaceArgs, split: Any, group: str | None) -> list[str]:
    if isinstance(args.features, str):
        return [args.features]
    if args.features is not None:
        return args.features
    return [name for name in split.column_names if name not in (args.target, group)]


def _columns(split: Any, names: Sequence[str], of: str) -> dict[str, NDArray[Any]]:
    for name in names:
        if name not in split.column_names:
            known = ", ".join(map(repr, split.column_names[:10]))
            raise DataError(
                f"data.args: split {of!r} has no column {name!r}; its columns are {known}"
            )
    with plugin_calls(f"data.args: split {of!r} cannot be decoded", raises=DataError):
        values = split.select_columns(list(dict.fromkeys(names))).with_format("numpy")[:]
    return {name: np.asarray(values[name]) for name in names}


def _stack(columns: dict[str, NDArray[Any]], names: Sequence[str]) -> NDArray[Any]:
    """Return the features (n, ...): one column of arrays, or several columns of numbers."""
    for name in names:
        if columns[name].dtype.kind not in "biuf":
            raise DataError(
                f"data.args.features: column {name!r} must hold numbers or images of one size, "
                "without gaps; name the columns of features, or prepare the dataset first"
            )
    if len(names) == 1 and columns[names[0]].ndim > 1:
        return columns[names[0]]
    for name in names:
        if columns[name].ndim != 1:
            raise DataError(
                f"data.args.features: column {name!r} holds arrays of shape "
                f"{columns[name].shape[1:]} beside other columns; name one column of features"
            )
    return np.stack([columns[name] for name in names], axis=1)
