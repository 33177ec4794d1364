"""Strategies by name: the built-in ones, and classes of the user."""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from pydantic import ValidationError

from fedsim.core.errors import InputError
from fedsim.core.plugin_errors import plugin_calls
from fedsim.core.plugins import PluginError, resolve
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.server.aggregation.mean import InvalidUpdateError, check_update
from fedsim.server.aggregation.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedsim.server.aggregation.strategies import FedAvg, Strategy
from fedsim.server.settings import FederationSettings
from fedsim.server.state import ServerState

STRATEGIES: Mapping[str, type[Strategy]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}


class StrategyError(InputError, ValueError):
    """A strategy that cannot be used; the message is one line with the fix."""


def strategy_for(
    settings: FederationSettings, *, base: Path = Path(), parameters: Collection[str] = ()
) -> Strategy:
    """Return the strategy that `federation.strategy` names.

    Args:
        settings: `federation:` of the experiment.
        base: the directory in which relative paths start.
        parameters: names of the model's trained parameters.

    Raises:
        StrategyError: there is no such strategy, or it does not take these settings.
    """
    named = settings.strategy_settings
    kind = STRATEGIES.get(named.name) or _own_strategy(named.name, base)
    try:
        kind.Options.model_validate(named.options)
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(str(part) for part in found["loc"])
        raise StrategyError(
            f"federation.strategy {named.name!r} refuses {key}: {found['msg']}; its settings are "
            f"{', '.join(kind.Options.model_fields) or 'none'}"
        ) from error
    with plugin_calls(f"federation.strategy {named.name!r} failed", raises=StrategyError):
        return kind(settings, parameters=parameters)


def check_strategy(strategy: Strategy, arrays: ArrayRecord) -> None:
    """Check a strategy on the initial model before the first round: two updates by that model.

    Args:
        strategy: the strategy.
        arrays: the initial model.

    Raises:
        StrategyError: an update fails, or returns no model of the same layout.
    """
    name = strategy.settings.strategy_settings.name
    reference, optimizer = to_numpy(arrays), dict[str, np.ndarray]()
    for number in range(2):
        start = to_arrays({one: value.copy() for one, value in reference.items()})
        state = ServerState(start, number, optimizer=optimizer)
        where = f"federation.strategy {name!r} failed on the initial model"
        with plugin_calls(where, raises=StrategyError):
            model, given = strategy.update(state, to_arrays(dict(reference)))
            optimizer = {str(one): np.asarray(value) for one, value in given.items()}
            values = to_numpy(model)
        try:
            check_update(values, reference)
        except InvalidUpdateError as error:
            raise StrategyError(
                f"federation.strategy {name!r} returned another layout than the model's: {error}"
            ) from error


def _own_strategy(name: str, base: Path) -> type[Strategy]:
    try:
        found = resolve(name, base=base, what="federation.strategy")
    except PluginError as error:
        raise StrategyError(str(error)) from error
    if not (isinstance(found, type) and issubclass(found, Strategy)) or inspect.isabstract(found):
        raise StrategyError(
            f"federation.strategy {name!r} is no strategy: write a class that derives from "
            "fedsim.server.aggregation.strategies.Strategy and has the method update"
        )
    return found
