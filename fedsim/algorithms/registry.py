"""Search for the algorithm of an experiment: built in, a user's class, or a Flower strategy."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from pydantic import ValidationError

from fedsim.algorithms.algorithm import (
    Algorithm,
    AlgorithmSettings,
    Contribution,
    Training,
    Update,
    algorithms,
)
from fedsim.algorithms.flower_strategy import of_flower
from fedsim.algorithms.state import Arrays, ServerState
from fedsim.core.errors import InputError, raised_as
from fedsim.core.plugin_errors import error_text, plugin_calls
from fedsim.core.plugins import resolve
from fedsim.core.settings import first_mistake

_MOST_TRIED = 16  # clients in a check, each with a copy of the model


class AlgorithmError(InputError, ValueError):
    """Raised if an algorithm cannot be used; the message names the fix."""


def algorithm_for(
    settings: AlgorithmSettings, *, base: Path = Path(), training: Training | None = None
) -> Algorithm:
    """Create the algorithm that `federation.strategy` names.

    Args:
        settings: the settings of `federation.strategy`.
        base: the directory to which relative paths refer.
        training: public facts about the federation and its local training.

    Raises:
        AlgorithmError: there is no such algorithm, or it does not accept these settings.
    """
    kind = algorithms().get(settings.name) or _own_class(settings.name, base)
    try:
        kind.Options.model_validate(settings.options)
    except ValidationError as error:
        raise AlgorithmError(
            f"federation.strategy {settings.name!r} refuses {first_mistake(error)}; its settings "
            f"are {', '.join(kind.Options.model_fields) or 'none'}"
        ) from error
    with plugin_calls(f"federation.strategy {settings.name!r} failed", raises=AlgorithmError):
        return kind(settings.options, training)


def check_algorithm(
    algorithm: Algorithm, name: str, arrays: ArrayRecord, *, clients: int = 2
) -> None:
    """Test an algorithm in two trial rounds before round 1, and raise if it fails.

    In the trial rounds, every upload is the initial model.

    Args:
        algorithm: the algorithm.
        name: the name of the algorithm in the experiment.
        arrays: the initial model.
        clients: the number of clients in a trial round.

    Raises:
        AlgorithmError: a method of the algorithm fails, or the next model has another layout or a
            value that is not finite.
    """
    state = ServerState(arrays)
    contributions = tuple(
        Contribution(client, numbers=dict.fromkeys(algorithm.private_numbers(), 1.0))
        for client in range(min(clients, _MOST_TRIED, algorithm.training.num_clients))
    )
    where = f"federation.strategy {name!r} failed on the initial model"
    with _memory_hints(algorithm, state.values), plugin_calls(where, raises=AlgorithmError):
        state = algorithm.init(state)
        for number in range(1, 3):
            values = {key: value.copy() for key, value in state.values.items()}
            stacked = {key: np.stack([value] * len(contributions)) for key, value in values.items()}
            models: Arrays = stacked if algorithm.uses_each_update else {}
            for contribution in contributions:
                algorithm.weight(contribution)
                _check_sent(algorithm, state, contribution.client)
                algorithm.start(state, contribution.client)
            after = algorithm.server(state, Update(values, contributions, models))
            _check_layout(after.values, state.values, name)
            state = replace(after, round_number=number)
        for model in algorithm.scored_models(state) or ():
            _check_layout(model, state.values, name)


@contextmanager
def _memory_hints(algorithm: Algorithm, names: Collection[str]) -> Iterator[None]:
    """Add to the error of a missing name the method that puts it into memory or update."""
    try:
        yield
    except AlgorithmError as error:
        missing = error.__cause__
        if not isinstance(missing, KeyError):
            raise
        name = error_text(missing)  # quoted, as KeyError has it
        hint = (
            "state.memory and state.client_memory begin empty: write init(self, state), which "
            f"returns state.with_memory({{{name}: array}}, {{name: a row for each client}})"
        )
        if name.strip("'") in names and not algorithm.uses_each_update:
            hint += "; update.models is empty without uses_each_update = True"
        raise AlgorithmError(f"{error}; {hint}") from missing


def _check_sent(algorithm: Algorithm, state: ServerState, client: int) -> None:
    """Check that an algorithm sends the declared arrays, each for every trained parameter."""
    sent, declared = algorithm.send(state, client), algorithm.sent_arrays()
    shapes = {name: value.shape for name, value in algorithm.trained(state)}
    if set(sent) != set(declared):
        raise ValueError(f"send returned {sorted(sent)}, and wire declares {sorted(declared)}")
    for name, arrays in sent.items():
        if {key: np.shape(value) for key, value in arrays.items()} != shapes:
            raise ValueError(f"send returned for {name!r} no array for each trained parameter")


def _check_layout(values: Mapping[str, np.ndarray], reference: Arrays, name: str) -> None:
    """Check that a new global model has the layout of the model, and finite values."""
    layouts = [{k: (v.shape, v.dtype) for k, v in arrays.items()} for arrays in (values, reference)]
    if list(values) != list(reference) or layouts[0] != layouts[1]:
        raise AlgorithmError(
            f"federation.strategy {name!r} returned another layout than the model's: "
            f"{layouts[0]}, expected {layouts[1]}"
        )
    for key, value in values.items():
        if not np.isfinite(value).all():
            raise AlgorithmError(
                f"federation.strategy {name!r} returned NaN or infinite values in {key!r} for an "
                "update that is the initial model"
            )


def _own_class(name: str, base: Path) -> type[Algorithm]:
    with raised_as(AlgorithmError):
        plugin = resolve(name, base=base, setting="federation.strategy")
    if isinstance(plugin, type) and issubclass(plugin, FlowerStrategy):
        return of_flower(plugin, name)
    if not (isinstance(plugin, type) and issubclass(plugin, Algorithm)) or inspect.isabstract(
        plugin
    ):
        raise AlgorithmError(
            f"federation.strategy {name!r} is no algorithm: write a class that derives from "
            "fedsim.algorithms.algorithm.Algorithm and has the method server, or name a strategy "
            "of Flower"
        )
    return plugin
