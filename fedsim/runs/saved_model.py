"""The trained model of a run, read from its directory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedsim.experiment.load import read_settings
from fedsim.models.build import build_model
from fedsim.models.errors import ModelError
from fedsim.models.features.module import FeatureModel
from fedsim.models.features.pipeline import FeaturePipeline
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import DamagedRunError, RunDirectoryError

_KEY = "fedsim"  # one entry: safetensors writes several in any order


@dataclass(frozen=True)
class ModelForm:
    """What is needed to build a model, beside its settings; part of `model.safetensors`.

    Attributes:
        input_shape: shape of one example as the model gets it.
        num_outputs: outputs per example.
    """

    input_shape: tuple[int, ...]
    num_outputs: int

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of the file."""
        form = {"input_shape": list(self.input_shape), "num_outputs": self.num_outputs}
        return {_KEY: json.dumps(form)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """Return the form in the metadata of a file.

        Raises:
            ValueError: the metadata have none.
        """
        try:
            form = json.loads(metadata[_KEY])
            return cls(tuple(map(int, form["input_shape"])), int(form["num_outputs"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("it does not say what inputs the model takes") from error


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
    directory = RunDirectory.open(Path(run))
    path = directory.path / "model.safetensors"
    settings = read_settings(directory.path / "experiment.yaml").model
    if not path.is_file():
        raise RunDirectoryError(
            f"{directory.path} has no model.safetensors: finish the run with fedsim run FILE --out "
            f"{directory.path} --resume"
        )
    try:
        with safe_open(path, framework="pt") as file:
            form = ModelForm.from_metadata(file.metadata() or {})
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedRunError.of(path, f"the model cannot be read: {error}") from error
    model = build_model(
        settings.model_copy(update={"init": None}),
        input_shape=form.input_shape,
        num_outputs=form.num_outputs,
        seed=0,
        base=Path.cwd() if base is None else Path(base).absolute(),
    )
    _load_values(model, values, path)
    if settings.features:
        model = FeatureModel(FeaturePipeline(settings.features), model)
    return model.eval()


def _load_values(model: nn.Module, values: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        model.load_state_dict(values)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{path}: the weights do not fit the model of the experiment, so it is another one "
            f"than was trained: {reason}"
        ) from error
