"""Rules of `model`: names and their arguments."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from fedsim.experiment.messages import PathMessage, validation_messages
from fedsim.experiment.references import check_name, check_weights
from fedsim.experiment.rules.messages import finite_messages, messages_at
from fedsim.experiment.text import KeyPath
from fedsim.models.catalog import LOSSES, MODELS
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
