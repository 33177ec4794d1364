"""Rules of the features that a model gets."""

from collections.abc import Iterator

from fedsim.data.catalog import DATASETS
from fedsim.data.settings import DataSettings
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules.sections import Sections
from fedsim.experiment.text import KeyPath
from fedsim.models.catalog import MODELS
from fedsim.models.features.shapes import FeatureShapeError, shape_after
from fedsim.models.settings import ModelSettings


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
