"""Rules of `model` (names and their arguments) and of the features that a model gets."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from fedsim.data.catalog import DATASETS
from fedsim.data.settings import DataSettings
from fedsim.experiment.errors import KeyPath
from fedsim.experiment.messages import PathMessage, validation_messages
from fedsim.experiment.references import check_name, check_weights
from fedsim.experiment.rules.sections import Sections, finite_messages, messages_at
from fedsim.models.catalog import LOSSES, MODELS
from fedsim.models.features.shapes import FeatureShapeError, shape_after
from fedsim.models.settings import ModelSettings


def check_model(model: ModelSettings, base: Path) -> Iterator[PathMessage]:
    """Yield the mistakes in the names of model and loss, and in the model's arguments.

    Args:
        model: the `model` section.
        base: the directory in which relative paths start.
    """
    args: KeyPath = ("model", "args")
    yield from messages_at(("model", "loss"), check_name(model.loss, "loss", LOSSES, base))
    yield from messages_at(("model", "name"), check_name(model.name, "model", MODELS, base))
    if model.init is not None:
        yield from messages_at(("model", "init"), check_weights(model.init, base))
    yield from _check_trained_part(model)
    if model.name not in MODELS:
        yield from finite_messages(model.args, args)
        return
    entry = MODELS[model.name]
    try:
        entry.args.model_validate(model.args)
    except ValidationError as error:
        yield from validation_messages(error, model.args, entry.args, args)


def _check_trained_part(model: ModelSettings) -> Iterator[PathMessage]:
    """Check that one key says what is trained, and that a frozen backbone is one."""
    if model.has_local_base and model.freeze:
        yield (
            ("model", "freeze"),
            "with model.train or model.lora all other parameters are frozen; remove freeze",
        )
    if model.lora is not None and model.init is None and model.name in MODELS:
        yield (
            ("model", "lora"),
            f"adapters need a trained backbone, and the weights of {model.name!r} would come from "
            "the seed; add init: weights.safetensors",
        )


def check_features(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes in `data.features` and in the shapes of `model.features`."""
    if sections.model is not None:
        yield from _check_transforms(sections.model, sections.data)
    if sections.data is None or sections.data.features != "tokens":
        return
    path: KeyPath = ("data", "features")
    if isinstance(sections.data.dataset, str) and sections.data.dataset in DATASETS:
        yield path, f"{sections.data.dataset} has numbers, no tokens; remove features"
    if sections.model is not None and sections.model.name in MODELS:
        yield (
            path,
            f"the built-in model {sections.model.name!r} takes numbers; use a model of your "
            "own that begins with an embedding, or features: numbers",
        )


def _check_transforms(model: ModelSettings, data: DataSettings | None) -> Iterator[PathMessage]:
    """Check the shapes of `model.features`, from the shape of the dataset where it is known."""
    features: KeyPath = ("model", "features")
    if model.features and data is not None and data.features == "tokens":
        yield features, "transforms take numbers, and data.features is tokens; remove features"
        return
    named = data.dataset if data is not None and isinstance(data.dataset, str) else ""
    try:
        shape = shape_after(model.features, DATASETS[named].shape if named in DATASETS else None)
    except FeatureShapeError as error:
        yield (*features, error.position), error.reason
        return
    if model.features and model.name == "cnn" and shape is not None and len(shape) != 3:
        yield (
            ("model", "name"),
            f"cnn takes images (channels, height, width), and model.features gives {shape}; "
            "use logistic or mlp",
        )


def check_views(sections: Sections) -> Iterator[PathMessage]:
    """Yield the reasons why examples have no views (`local.augmentations`)."""
    if sections.local is None or sections.local.views is None:
        return
    key = "augmentations" if sections.local.augment is None else "augment"
    if sections.data is not None and sections.data.features == "tokens":
        yield (
            ("local", key),
            "views shift, mirror or blur numbers, and data.features is tokens; remove "
            "augmentations and augment",
        )
    if sections.model is not None and sections.model.features:
        yield (
            ("local", key),
            "views are drawn anew in each step, and model.features transforms each example once, "
            "before training; remove augmentations and augment, or model.features",
        )
