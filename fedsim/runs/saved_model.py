"""The trained model of a run, read from its directory."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedsim.experiment.load import read_settings
from fedsim.models.adapters import merge_adapters
from fedsim.models.build import build_model
from fedsim.models.errors import ModelError
from fedsim.models.features.pipeline import FeatureModel, FeaturePipeline
from fedsim.models.local_base import OtherBaseError
from fedsim.models.settings import ModelSettings
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import DamagedRunError, RunDirectoryError
from fedsim.runs.model_card import ModelCard

_FILE = "model.safetensors"
_OF_WHOLE_MODELS = {"init": None, "train": [], "lora": None}


def read_model_card(run: str | Path) -> ModelCard:
    """Return what the final model of a run says of itself: classes, metrics, guarantee.

    Args:
        run: the run directory.

    Raises:
        RunDirectoryError: it is no run directory, or has no final model yet.
        DamagedRunError: the file is damaged.
    """
    return _read_model(RunDirectory.open(Path(run)))[0]


def same_arrays(saved: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> bool:
    """Return whether two models have the same names, shapes, types and bits.

    Args:
        saved: arrays of a file, by name.
        arrays: arrays in memory.
    """
    return saved.keys() == arrays.keys() and all(
        value.dtype == saved[name].dtype
        and value.shape == saved[name].shape
        and np.asarray(value).tobytes() == saved[name].tobytes()
        for name, value in arrays.items()
    )


def load_model(run: str | Path, *, base: str | Path | None = None) -> nn.Module:
    """Return the final global model of a run, in eval mode, on the CPU.

    It takes inputs as the dataset has them, float32 (n, ...), and applies the transforms of
    `model.features` to them. A model of your own is built by its plug-in, whose code is executed.

    Args:
        run: the run directory.
        base: directory of the experiment file, where `./file.py:build` is found; None: the current
            directory.

    Raises:
        RunDirectoryError: it is no run directory, or has no final model yet.
        DamagedRunError: a file is damaged.
        ExperimentError: `experiment.yaml` is not what a run writes.
        ModelError: the model cannot be built, or is not the one that was trained.
    """
    settings, model = _load(run, base)
    if settings.features:
        model = FeatureModel(FeaturePipeline(settings.features), model)
    return model.eval()


def load_core(run: str | Path, *, base: Path) -> nn.Module:
    """Return the final model of a run for examples that `model.features` has transformed.

    Args:
        run: the run directory.
        base: directory of the experiment file.

    Raises:
        Exception: as `load_model`.
    """
    return _load(run, base)[1].eval()


def _load(run: str | Path, base: str | Path | None) -> tuple[ModelSettings, nn.Module]:
    """Return the settings of a run's model, and the model without its features."""
    directory = RunDirectory.open(Path(run))
    experiment = read_settings(directory.path / "experiment.yaml")
    settings = experiment.model
    card, values = _read_model(directory)
    is_whole = settings.lora is None or settings.lora.save == "merged"
    model = build_model(
        settings.model_copy(update=_OF_WHOLE_MODELS) if is_whole else settings,
        input_shape=card.input_shape,
        num_outputs=card.num_outputs,
        seed=experiment.seed,
        base=Path.cwd() if base is None else Path(base).absolute(),
    )
    _load_values(model, values, directory.path / _FILE)
    return settings, model if is_whole else merge_adapters(model)


def _read_model(directory: RunDirectory) -> tuple[ModelCard, dict[str, torch.Tensor]]:
    path = directory.path / _FILE
    if not path.is_file():
        raise RunDirectoryError(
            f"{directory.path} has no {_FILE}: finish the run with fedsim run FILE --out "
            f"{directory.path} --resume"
        )
    try:
        with safe_open(path, framework="pt") as file:
            card = ModelCard.from_metadata(file.metadata() or {})
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedRunError.of(path, f"the model cannot be read: {error}") from error
    return card, values


def _load_values(model: nn.Module, values: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        model.load_state_dict(values)
    except OtherBaseError as error:
        raise ModelError(
            f"{path}: the adapters belong to another backbone than model.init gives here: restore "
            "the file of model.init; base is the directory that its path starts in"
        ) from error
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{path}: the weights do not fit the model of the experiment, so it is another one "
            f"than was trained: {reason}"
        ) from error
