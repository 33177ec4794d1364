"""Loading of the dataset that an experiment names: a built-in one, a file, or a function."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsim.core.commands import ByName
from fedsim.core.errors import raised_as
from fedsim.core.plugins import plugin_calls, resolve, unknown_plugin
from fedsim.core.python_objects import PythonObject
from fedsim.core.settings import first_mistake
from fedsim.data.catalog import DATASETS
from fedsim.data.examples import DataError, Dataset, to_dataset
from fedsim.data.file_names import matching_files
from fedsim.data.settings import (
    DataSettings,
    FileDataset,
    FilesPartition,
    LoadContext,
    group_column,
)

LOADERS: Mapping[str, Callable[[Any, LoadContext], Dataset]] = ByName(
    {
        "digits": "fedsim.data.builtin.scikit:load_digits",
        "iris": "fedsim.data.builtin.scikit:load_iris",
        "wine": "fedsim.data.builtin.scikit:load_wine",
        "breast_cancer": "fedsim.data.builtin.scikit:load_breast_cancer",
        "diabetes": "fedsim.data.builtin.scikit:load_diabetes",
        "linnerud": "fedsim.data.builtin.scikit:load_linnerud",
        "heart_disease": "fedsim.data.builtin.heart_disease:load_heart_disease",
        "mnist": "fedsim.data.builtin.mnist:load_mnist",
        "mnist5k": "fedsim.data.builtin.mnist:load_mnist5k",
        "fashion_mnist": "fedsim.data.builtin.mnist:load_fashion_mnist",
        "emnist": "fedsim.data.builtin.mnist:load_emnist",
        "cifar10": "fedsim.data.builtin.cifar:load_cifar10",
        "schools": "fedsim.data.builtin.grouped_tables:load_schools",
        "chem97": "fedsim.data.builtin.grouped_tables:load_chem97",
        "medpar": "fedsim.data.builtin.grouped_tables:load_medpar",
        "movielens_small": "fedsim.data.builtin.movielens:load_movielens_small",
        "movielens100k": "fedsim.data.builtin.movielens:load_movielens100k",
        "huggingface": "fedsim.data.builtin.hugging_face:load_hugging_face",
        "synthetic_fedprox": "fedsim.data.builtin.synthetic:load_synthetic_fedprox",
        "synthetic_logistic": "fedsim.data.builtin.synthetic:load_synthetic_logistic",
        "blobs": "fedsim.data.builtin.synthetic:load_blobs",
    }
)


_RETURNS = "(x, y) or (x_train, y_train, x_test, y_test)"


def load_dataset(settings: DataSettings, *, seed: int, base: Path) -> Dataset:
    """Return the dataset of the section `data` before its examples are divided among clients.

    Args:
        settings: the section `data` of the experiment.
        seed: the experiment's seed, passed to a dataset function. A `seed` in `data.args` replaces
            it, so that runs with other seeds use the same data.
        base: the directory to which relative paths refer.

    Raises:
        DataError: the dataset is unknown or cannot be used.
    """
    dataset, tokens = settings.dataset, settings.features == "tokens"
    if isinstance(dataset, PythonObject) and dataset.arrays is not None:
        if settings.args:
            raise DataError("data.args are for dataset functions, and arrays take none; remove it")
        return _convert(dataset.arrays, "data.dataset", settings)
    if isinstance(dataset, str) and ":" in dataset:
        return _call(dataset, {"seed": seed, **settings.args}, base, settings)
    if isinstance(dataset, FileDataset):
        if settings.args:
            raise DataError(
                f"data.args are for dataset functions; {dataset.path or 'a file'} takes none, "
                f"got {', '.join(settings.args)}; remove them"
            )
        from fedsim.data.files import read_files

        column = group_column(settings.partition)
        return read_files(
            data_paths(settings, base),
            dataset,
            test=None if dataset.test is None else base / Path(dataset.test).expanduser(),
            group=None if column == dataset.target else column,
            tokens=tokens,
            images=settings.images,
        )
    return _built_in(dataset, settings, seed, base)


def data_paths(settings: DataSettings, base: Path) -> dict[str, Path]:
    """Return the files with the clients' examples, as a dictionary from name to path.

    The dictionary is empty if the dataset is not read from files that the user names.

    Args:
        settings: the section `data` of the experiment.
        base: the directory to which relative paths refer.

    Raises:
        DataError: the dataset is read from a file, but the experiment gives neither its path nor a
            pattern; or no file matches the pattern.
    """
    dataset, division = settings.dataset, settings.partition
    if not isinstance(dataset, FileDataset):
        return {}
    if isinstance(division, FilesPartition):
        paths = matching_files(division.pattern, base)
        if not paths:
            where = f"{division.pattern!r} in {base}"
            raise DataError(f"data.partition.pattern: no file matches {where}")
        return paths
    if dataset.path is None:
        raise DataError("data.dataset.path: missing; name the file with the examples")
    path = base / Path(dataset.path).expanduser()
    return {path.stem: path}


def _built_in(name: str, settings: DataSettings, seed: int, base: Path) -> Dataset:
    if name not in DATASETS:
        own = "package.module:function or {path: file.csv, target: column}"
        raise DataError(unknown_plugin("data.dataset", "dataset", name, DATASETS, own))
    if (problem := settings.features_mistake(has_tokens=DATASETS[name].tokens)) is not None:
        raise DataError(f"data.features: {problem}")
    try:
        args = DATASETS[name].args.model_validate(settings.args)
    except ValidationError as error:
        mistake = first_mistake(error, "data", "args")
        raise DataError(f"{mistake} (dataset {name})") from error
    group = group_column(settings.partition)
    return LOADERS[name](args, LoadContext(seed, base, settings.images, group))


def _call(reference: str, args: dict[str, Any], base: Path, settings: DataSettings) -> Dataset:
    key = "data.dataset"
    with raised_as(DataError):
        load = resolve(reference, base=base, setting=key)
    where = f"{key} {reference!r}"
    fix = "it is called with data.args and the experiment's seed"
    with plugin_calls(f"{where}: failed", raises=DataError, fix=fix):
        parts = load(**args)
    if not isinstance(parts, tuple | list) or len(parts) not in (2, 4):
        got = f"{len(parts)} values" if isinstance(parts, tuple | list) else type(parts).__name__
        raise DataError(f"{where}: must return {_RETURNS}, got {got}")
    return _convert(parts, where, settings)


def _convert(parts: Sequence[Any], where: str, settings: DataSettings) -> Dataset:
    """Return the dataset of a user's two or four arrays."""
    fix = f"return {_RETURNS}"
    with (
        raised_as(DataError, f"{where}: "),
        plugin_calls("its arrays failed", raises=DataError, fix=fix),
    ):
        tokens = settings.features == "tokens"
        return to_dataset(*parts, tokens=tokens, images=settings.images)
