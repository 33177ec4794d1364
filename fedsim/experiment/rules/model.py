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
    if model.name not in MODELS:
        yield from finite_messages(model.args, args)
        return
    entry = MODELS[model.name]
    try:
        entry.args.model_validate(model.args)
    except ValidationError as error:
        yield from validation_messages(error, model.args, entry.args, args)
