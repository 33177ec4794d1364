"""Rules of `model` and `federation.strategy`: names and their arguments."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from fedsim.experiment.messages import PathMessage, validation_messages
from fedsim.experiment.references import check_name, check_weights
from fedsim.experiment.rules.messages import finite_messages, messages_at
from fedsim.experiment.text import KeyPath
from fedsim.models.catalog import LOSSES, MODELS
from fedsim.models.settings import ModelSettings
from fedsim.server.aggregation.strategy_settings import STRATEGIES
from fedsim.server.settings import FederationSettings


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


def check_strategy(federation: FederationSettings, base: Path) -> Iterator[PathMessage]:
    """Yield the mistakes in the name of the strategy and its arguments.

    Args:
        federation: the `federation` section.
        base: the directory in which relative paths start.
    """
    path: KeyPath = ("federation", "strategy")
    named = federation.strategy_settings
    place = path if isinstance(federation.strategy, str) else (*path, "name")
    yield from messages_at(place, check_name(named.name, "strategy", STRATEGIES, base))
    if named.name not in STRATEGIES:
        yield from finite_messages(named.options, path)
        return
    settings = STRATEGIES[named.name].settings
    try:
        settings.model_validate(named.options)
    except ValidationError as error:
        yield from validation_messages(error, named.options, settings, path)
