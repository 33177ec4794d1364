"""Loading of the trained model of a run, and predictions for the examples in a file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import nn

from fedsim.core.errors import one_line
from fedsim.core.metrics import TASK_OF_LOSS
from fedsim.core.plugin_errors import plugin_calls
from fedsim.core.python_objects import is_object_name, object_of
from fedsim.data.examples import DataError
from fedsim.data.inputs import Inputs, read_inputs
from fedsim.experiment import ExperimentWithClients
from fedsim.experiment.errors import shorten
from fedsim.experiment.load import read_settings
from fedsim.models.adapters import merge_adapters
from fedsim.models.build import build_model
from fedsim.models.catalog import ModelError
from fedsim.models.features.transforms import FeatureModel, FeaturePipeline
from fedsim.models.local_base import OtherBaseError
from fedsim.models.scores.metrics import class_names, summarise_scores
from fedsim.models.scores.predictions import NumberPredictions, predictions_of
from fedsim.models.settings import ModelSettings
from fedsim.models.tasks import Targets, eval_mode, task_for
from fedsim.runs.directory import MODEL, RunDirectory
from fedsim.runs.files import DamagedRunError, RunDirectoryError
from fedsim.runs.records import ModelCard

ModelBuilder = Callable[..., nn.Module]
_OF_WHOLE_MODELS = {"init": None, "train": [], "lora": None}


def read_model_card(run: str | Path) -> ModelCard:
    """Return the model card of a run's final model: inputs, classes, metrics and privacy guarantee.

    Raises:
        RunDirectoryError: `run` is no run directory, or has no final model yet.
        DamagedRunError: the file is damaged.
    """
    return _read_model(RunDirectory.open(Path(run)))[0]


def load_model(
    run: str | Path, *, base: str | Path | None = None, build: ModelBuilder | None = None
) -> nn.Module:
    """Return the final global model of a run, in eval mode, on the CPU.

    The model takes inputs as the dataset has them, float32 (n, ...), and applies the transforms of
    `model.features` to them. A model from a plug-in is built by executing the plug-in's code.

    Args:
        run: the run directory.
        base: directory of the experiment file, where `./file.py:build` is found; None means the
            current directory.
        build: the class or function that the experiment gave as a Python object; None where it
            named a built-in model or a file.

    Raises:
        RunDirectoryError: `run` is no run directory, or has no final model yet.
        DamagedRunError: a file is damaged.
        ExperimentError: `experiment.yaml` is not what a run writes.
        ModelError: the model cannot be built, or is not the model that was trained.

    Example:
        >>> import tempfile
        >>> import fedsim
        >>> experiment = {
        ...     "name": "mine",
        ...     "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
        ...     "model": {"name": "logistic"},
        ...     "federation": {"rounds": 2},
        ...     "local": {"steps": 1, "batch_size": 32},
        ...     "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0},
        ... }
        >>> result = fedsim.run(experiment, out=tempfile.mkdtemp())
        >>> model, card = fedsim.load_model(result.path), fedsim.read_model_card(result.path)
        >>> type(model).__name__, card.experiment
        ('Sequential', 'mine')
    """
    return _load(run, base, build)[2]


def load_core(run: str | Path, *, base: Path, build: ModelBuilder | None = None) -> nn.Module:
    """Return the final model of a run, which takes inputs to which `model.features` was applied."""
    return _load(run, base, build, transforms=False)[2]


def _load(
    run: str | Path, base: str | Path | None, build: ModelBuilder | None, *, transforms: bool = True
) -> tuple[ExperimentWithClients, ModelCard, nn.Module]:
    """Return a run's experiment, model card and model, maybe without its feature transforms."""
    directory = RunDirectory.open(Path(run))
    experiment = read_settings(directory.path / "experiment.yaml")
    settings = _with_object(experiment.model, build)
    card, values = _read_model(directory)
    is_whole = settings.lora is None or settings.lora.save == "merged"
    try:
        model = build_model(
            settings.model_copy(update=_OF_WHOLE_MODELS) if is_whole else settings,
            input_shape=card.input_shape,
            num_outputs=card.num_outputs,
            seed=experiment.seed,
            base=Path.cwd() if base is None else Path(base).absolute(),
        )
    except ModelError as error:
        plugin = error.__cause__
        if plugin is None or not isinstance(plugin.__cause__, FileNotFoundError):
            raise
        raise ModelError(f"{error}, whose directory base (--base) names") from plugin
    _load_values(model, values, directory.path / MODEL)
    model = model if is_whole else merge_adapters(model)
    if transforms and settings.features:
        model = FeatureModel(FeaturePipeline(settings.features), model)
    return experiment, card, model.eval()


def _with_object(settings: ModelSettings, build: ModelBuilder | None) -> ModelSettings:
    """Return the settings with the Python object that `model.name` names."""
    name = settings.name
    if build is None and is_object_name(name):
        raise ModelError(
            f"model.name {name!r}: the model was given as a Python object; give it again, "
            f"load_model(run, build={name.partition(':')[2]})"
        )
    if build is None:
        return settings
    given = object_of(build)
    if given is None or given != name:
        got = repr(build) if given is None else given.name
        raise ModelError(f"build is {shorten(got)}, and the run has model.name {name!r}")
    return settings.model_copy(update={"name": given})


def _read_model(directory: RunDirectory) -> tuple[ModelCard, dict[str, torch.Tensor]]:
    path = directory.path / MODEL
    if not path.is_file():
        raise RunDirectoryError(
            f"{directory.path} has no {MODEL}: finish the run with fedsim run FILE --out "
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
        raise ModelError(
            f"{path}: the weights do not fit the model of the experiment, so it is another one "
            f"than was trained: {one_line(error)}"
        ) from error


MAX_PROBABILITY_COLUMNS = 20
_BATCH_EXAMPLES = 1024
_LOSS_OF_TASK = {task: loss for loss, task in TASK_OF_LOSS.items()}


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for several examples, in the order of the examples.

    Attributes:
        values: prediction for each of the n examples: a class name, a list of label names, or a
            number (a list for several numbers).
        classes: names of the classes or labels; None in regression.
        probabilities: probability of each class or label (n, classes); None in regression.
        targets: true value of each example in the file, in the form of `values`; None if the file
            has no targets.
        kept: columns of the file that are not features (such as an identifier), as text, by name.
        scores: metrics on the file's targets, as in `scores.json`; None without targets.
    """

    values: Sequence[Any]
    classes: tuple[str, ...] | None
    probabilities: NDArray[np.float64] | None
    targets: Sequence[Any] | None = None
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scores: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def columns(self) -> dict[str, Sequence[Any]]:
        """The predictions as columns of a table, by name."""
        columns = _spread("prediction", self.values, self.classes)
        if self.probabilities is not None and self.classes is not None:
            if isinstance(self.values[0], str):
                columns["probability"] = self.probabilities.max(axis=1).tolist()
            if len(self.classes) <= MAX_PROBABILITY_COLUMNS:
                for index, name in enumerate(self.classes):
                    columns[f"p_{name}"] = self.probabilities[:, index].tolist()
        if self.targets is not None:
            columns |= _spread("target", self.targets, self.classes)
        others = {f"input_{k}" if k in columns else k: values for k, values in self.kept.items()}
        return {**others, **columns}


def predict(
    run: str | Path,
    inputs: str | Path | NDArray[Any],
    *,
    base: str | Path | None = None,
    build: ModelBuilder | None = None,
) -> Predictions:
    """Return the predictions of a run's final model for examples.

    Args:
        run: the run directory.
        inputs: a .csv, .parquet or .npz file, read as the run read its data; or features as the
            dataset has them (n, ...).
        base: directory of the experiment file, where plug-ins are found; None means the current
            directory.
        build: the class or function that the experiment gave as a Python object; see `load_model`.

    Raises:
        RunDirectoryError: `run` is no run directory, or has no final model.
        DataError: the file cannot be read, or lacks a column of the model.
        ModelError: the model cannot be built, or does not take these examples.
    """
    experiment, card, model = _load(run, base, build)
    if isinstance(inputs, str | Path):
        _check_file(Path(inputs))
        examples = read_inputs(
            experiment.data, Path(inputs), columns=card.columns, class_names=card.class_names
        )
    else:
        tokens = experiment.data.features == "tokens"
        features = np.asarray(inputs, np.int64) if tokens else np.asarray(inputs, np.float32)
        examples = Inputs(features, None)
    _check_shape(examples.features, card, inputs if isinstance(inputs, str | Path) else "inputs")
    return _predictions(card, _outputs(model, examples.features), examples)


def _predictions(card: ModelCard, outputs: torch.Tensor, inputs: Inputs) -> Predictions:
    given = inputs.targets
    targets = _no_targets(card, len(outputs)) if given is None else given
    task = task_for(_LOSS_OF_TASK[card.task], targets, num_classes=card.num_outputs)
    predictions = predictions_of(task, outputs, torch.from_numpy(targets))
    classes, probabilities, scores = None, None, None
    if given is not None:
        metrics = task.metrics(task.score(outputs, torch.from_numpy(targets)), targets)
        scores = summarise_scores(predictions, card.class_names, metrics)
    if not isinstance(predictions, NumberPredictions):
        classes = tuple(class_names(predictions.scores.shape[1], card.class_names))
        probabilities = predictions.probabilities
    return Predictions(
        values=_shown(predictions.predicted, classes),
        classes=classes,
        probabilities=probabilities,
        targets=None if given is None else _shown(predictions.targets, classes),
        kept=inputs.kept,
        scores=scores,
    )


def _shown(values: NDArray[Any], classes: Sequence[str] | None) -> Sequence[Any]:
    """Return predictions or targets as class names, lists of labels 0 and 1, or numbers."""
    if classes is None:
        return values[:, 0].tolist() if values.shape[1] == 1 else values.tolist()
    if values.ndim == 1:
        return [classes[index] for index in values]
    return values.astype(int).tolist()


def _no_targets(card: ModelCard, count: int) -> Targets:
    """Return placeholder targets for `count` examples without targets."""
    if card.task == "classification":
        return np.zeros(count, np.int64)
    return np.zeros((count, card.num_outputs), np.float32)


def _outputs(model: nn.Module, features: NDArray[Any]) -> torch.Tensor:
    """Return the outputs of the model, batch by batch."""
    failed = "the model failed on the inputs"
    with eval_mode(model), torch.no_grad(), plugin_calls(failed, raises=ModelError):
        batches = torch.from_numpy(features).split(_BATCH_EXAMPLES)
        return torch.cat([model(batch) for batch in batches])


def _check_shape(features: NDArray[Any], card: ModelCard, where: str | Path) -> None:
    expected = card.raw_input_shape
    if len(features) == 0:
        raise ModelError(f"{where}: no examples to predict")
    if features.shape[1:] != expected:
        raise ModelError(
            f"{where}: an example has shape {features.shape[1:]}, and the model takes {expected}; "
            "give the features of the run's data, in their order"
        )


def _check_file(path: Path) -> None:
    if path.suffix.lower() not in (".csv", ".parquet", ".npz"):
        raise DataError(f"{path}: examples to predict must be in a .csv, .parquet or .npz file")
    if not path.is_file():
        raise DataError(f"{path}: no such file")


def _spread(name: str, values: Sequence[Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return values as one column, or lists as a column for each element, by column name."""
    if not isinstance(values[0], list):
        return {name: values}
    parts = range(len(values[0])) if names is None else names
    return {f"{name}_{part}": [value[i] for value in values] for i, part in enumerate(parts)}
