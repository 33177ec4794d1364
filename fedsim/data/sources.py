"""Datasets by name: a built-in dataset, a file, or the user's function."""

from collections.abc import Callable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.plugins import PluginError, plugin_calls, resolve
from fedsim.data.catalog import DATASETS
from fedsim.data.conversion import Dataset, to_dataset
from fedsim.data.examples import DataError, Examples
from fedsim.data.files import read_files
from fedsim.data.settings import DataSettings, FileDataset

_RETURNS = "(x, y) or (x_train, y_train, x_test, y_test)"


def load_dataset(settings: DataSettings, *, seed: int, base: Path) -> Dataset:
    """Return the dataset of `data:` before it is divided.

    Args:
        settings: `data:` of the experiment.
        seed: the experiment's seed, passed to a dataset function. A `seed` in `data.args` replaces
            it and keeps the data the same over repetitions.
        base: the directory in which relative paths start.

    Raises:
        DataError: the dataset is unknown or cannot be used.
    """
    dataset, tokens = settings.dataset, settings.features == "tokens"
    if isinstance(dataset, str) and ":" in dataset:
        return _call(dataset, {"seed": seed, **settings.args}, base, settings)
    if settings.args:
        raise DataError(
            f"data.args are for dataset functions; {_name(dataset)} takes none, "
            f"got {', '.join(settings.args)}; remove them"
        )
    if isinstance(dataset, FileDataset):
        return read_files(
            data_paths(settings, base),
            dataset,
            test=None if dataset.test is None else base / Path(dataset.test).expanduser(),
            group=None,
            tokens=tokens,
            images=settings.images,
        )
    if tokens:
        raise DataError(f"data.features: {dataset} has numbers, no tokens; remove data.features")
    return _built_in(dataset)()


def data_paths(settings: DataSettings, base: Path) -> dict[str, Path]:
    """Return the files with the clients' examples, by name in order; empty without any.

    Args:
        settings: `data:` of the experiment.
        base: the directory in which relative paths start.

    Raises:
        DataError: the experiment names no file.
    """
    if not isinstance(settings.dataset, FileDataset):
        return {}
    if settings.dataset.path is None:
        raise DataError("data.dataset.path: missing; name the file with the examples")
    path = base / Path(settings.dataset.path).expanduser()
    return {path.stem: path}


def load_digits() -> Dataset:
    """Return scikit-learn's digits: 1,797 images (1, 8, 8) with values in [0, 1], 10 classes."""
    x, y = _digits()
    pixels = np.asarray(x, dtype=np.float32).reshape(-1, 1, 8, 8) / np.float32(16)
    return Dataset(Examples(pixels, np.asarray(y, dtype=np.int64)))


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the digits' pixels (1797, 64) and classes (1797,) of scikit-learn's `load_digits`.

    Importing that function takes longer than the rounds of a first experiment. Its file is read
    directly if it is in the usual place.
    """
    spec = find_spec("sklearn")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits as load

    pixels, classes = load(return_X_y=True)
    return np.asarray(pixels), np.asarray(classes)


def _built_in(name: str) -> Callable[[], Dataset]:
    loaders = {"digits": load_digits}
    if name not in loaders:
        close = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"built in: {', '.join(DATASETS)}"
        raise DataError(
            f"data.dataset: no dataset named {name!r}; {hint} "
            "(your own: package.module:function or {path: file.csv, target: column})"
        )
    return loaders[name]


def _call(reference: str, args: dict[str, Any], base: Path, settings: DataSettings) -> Dataset:
    what = "data.dataset"
    try:
        load = resolve(reference, base=base, what=what)
    except PluginError as error:
        raise DataError(str(error)) from error
    where = f"{what} {reference!r}"
    fix = "it is called with data.args and the experiment's seed"
    with plugin_calls(f"{where}: failed", raises=DataError, fix=fix):
        parts = load(**args)
    if not isinstance(parts, tuple | list) or len(parts) not in (2, 4):
        got = f"{len(parts)} values" if isinstance(parts, tuple | list) else type(parts).__name__
        raise DataError(f"{where}: must return {_RETURNS}, got {got}")
    try:
        with plugin_calls("its arrays failed", raises=DataError, fix=f"return {_RETURNS}"):
            tokens = settings.features == "tokens"
            return to_dataset(*parts, tokens=tokens, images=settings.images)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _name(dataset: str | FileDataset) -> str:
    return (dataset.path or "a file") if isinstance(dataset, FileDataset) else dataset
