"""Checks before round 1: an algorithm does what it declares, and training changes parameters.

The search for the algorithm is here, too: built in, a user's class, or a Flower strategy. Noise
changes every parameter, so a private run does not show that a layer learns nothing. These
checks take two steps of plain SGD on public examples, without noise, and undo them. One step is not
enough: the factor A of a low-rank adapter has a gradient only once B is no longer 0.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from pydantic import ValidationError
from torch import Tensor, nn

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
from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.local_settings import SgdSettings
from fedsim.clients.model_checks.safety import preserve_state
from fedsim.core.errors import InputError, raised_as
from fedsim.core.plugin_errors import error_text, plugin_calls
from fedsim.core.plugins import resolve
from fedsim.core.settings import first_mistake
from fedsim.experiment import ExperimentWithClients
from fedsim.experiment.rules import Sections
from fedsim.experiment.rules.algorithm import too_few_clients, unmet_declarations
from fedsim.experiment.rules.mechanisms import changed_steps
from fedsim.federation.schedule import participation_of
from fedsim.models.adapters import AdaptedLayer
from fedsim.models.catalog import ModelError
from fedsim.protocol.arrays import COEFFICIENTS, to_arrays

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


def algorithm_of(experiment: ExperimentWithClients, model: nn.Module, base: Path) -> Algorithm:
    """Return a new object of the experiment's algorithm.

    Args:
        experiment: the settings.
        model: the global model; the algorithm changes its trained parameters.
        base: the directory in which relative paths start.

    Raises:
        AlgorithmError: there is no such algorithm, or it does not accept its settings.
    """
    optimizer = experiment.local.optimizer
    named = model.named_parameters(remove_duplicate=False)
    trained = frozenset(name for name, value in named if value.requires_grad)
    training = Training(
        parameters=trained if experiment.local.zeroth_order is None else frozenset({COEFFICIENTS}),
        num_clients=experiment.num_clients,
        learning_rate=experiment.local.learning_rate,
        momentum=optimizer.momentum if isinstance(optimizer, SgdSettings) else 0.0,
    )
    return algorithm_for(experiment.federation.algorithm, base=base, training=training)


def checked_algorithm(experiment: ExperimentWithClients, model: nn.Module, base: Path) -> Algorithm:
    """Return the experiment's algorithm; a plug-in's methods are first tried on the initial model.

    Args:
        experiment: the settings.
        model: the initial model.
        base: the directory in which relative paths start.

    Raises:
        AlgorithmError: there is no such algorithm, it does not accept its settings, one of its
            calls fails, or the settings do not allow what it declares.
    """
    algorithm = algorithm_of(experiment, model, base)
    name = experiment.federation.algorithm.name
    if name not in algorithms():  # of a built-in one the rules of the file know it
        sections, settings = Sections.of(dict(experiment), base), experiment.federation
        clients, _ = participation_of(experiment).round_sizes
        for path, message in (
            *unmet_declarations(type(algorithm), settings, sections),
            *changed_steps(algorithm, name, experiment.privacy),
            *too_few_clients(algorithm, name, clients),
        ):
            raise AlgorithmError(f"{'.'.join(map(str, path))}: {message}")
        arrays = {key: value.cpu().numpy() for key, value in model.state_dict().items()}
        check_algorithm(algorithm, name, to_arrays(arrays), clients=clients)
    return algorithm


_STEPS = 2
_MAX_NAMES = 5
_MOVE = 0.1
_UNUSED = (
    "the outputs do not depend on it; use it in forward, without detach() and torch.no_grad(), or "
    "exclude it by model.freeze"
)


@dataclass(frozen=True)
class StillParameter:
    """A trainable parameter that two training steps on public examples do not change.

    Attributes:
        name: the parameter's name in the model.
        reason: the cause, with the fix.
    """

    name: str
    reason: str


def still_parameters(
    model: nn.Module, loss: PerExampleLoss, features: Tensor, targets: Tensor, *, lr: float
) -> tuple[StillParameter, ...]:
    """Return the trainable parameters that two steps of SGD do not change.

    Args:
        model: the initial model.
        loss: the loss function, which returns one value per example.
        features: the features of public examples (n ≥ 1, ...).
        targets: the targets of these examples (n, ...).
        lr: the learning rate.

    Guarantee:
        the model's values, buffers and modes and the global random generators are unchanged.

    Raises:
        ModelError: no parameter changes, whatever the examples, so that nothing would be learned.
            The outputs depend on no parameter, or every step is below the floating-point precision.
            Gradients of 0 raise nothing, as they may be due to the public examples.
    """
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    named = [(name, value) for name, value in trained if value.numel()]
    start = [value.detach().clone() for _, value in named]
    was_used, had_gradient = [False] * len(named), [False] * len(named)
    with preserve_state(model):
        model.eval()
        try:
            for _ in range(_STEPS):
                for k, gradient in enumerate(_gradients(model, loss, features, targets, named)):
                    if gradient is None:
                        continue
                    was_used[k] = True
                    had_gradient[k] |= bool(gradient.any())
                    with torch.no_grad():
                        named[k][1].sub_(gradient.nan_to_num(), alpha=lr)
            moved = [not torch.equal(v, s) for (_, v), s in zip(named, start, strict=True)]
        finally:
            with torch.no_grad():
                for (_, value), first in zip(named, start, strict=True):
                    value.copy_(first)
    still = tuple(
        StillParameter(name, _reason(model, name, used=used, gradient=gradient, lr=lr))
        for (name, _), used, gradient, changed in zip(
            named, was_used, had_gradient, moved, strict=True
        )
        if not changed
    )
    by_examples = (u and not g for u, g in zip(was_used, had_gradient, strict=True))
    if len(still) == len(named) and not any(by_examples):
        raise ModelError(
            f"training moves no parameter of the model: {_listed(still)} on public examples; "
            f"{still[0].reason}"
        )
    return still


def parameters_without_effect(
    model: nn.Module, loss: PerExampleLoss, features: Tensor, targets: Tensor
) -> tuple[StillParameter, ...]:
    """Return the trainable parameters that do not affect the losses, found by forward passes.

    Zeroth-order steps along random directions change all parameters, even those without effect.

    Args:
        model: the initial model.
        loss: the loss function, which returns one value per example.
        features: the features of public examples (n ≥ 1, ...).
        targets: the targets of these examples (n, ...).

    Guarantee:
        the model's values, buffers and modes and the global random generators are unchanged.

    Raises:
        ModelError: the losses depend on no parameter, so that nothing would be learned.
    """
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    start = [value.detach().clone() for _, value in named]
    generator = torch.Generator().manual_seed(0)
    still = list[StillParameter]()
    with preserve_state(model), torch.no_grad():
        model.eval()
        try:
            for _, value in named:  # away from a start at 0, where factors have no effect alone
                value.add_(_MOVE * torch.randn(value.shape, generator=generator).to(value))
            expected = loss(model(features), targets)
            for name, value in named:
                before = value.clone()
                value.add_(_MOVE * torch.randn(value.shape, generator=generator).to(value))
                if torch.equal(loss(model(features), targets), expected):
                    still.append(StillParameter(name, _UNUSED))
                value.copy_(before)
        finally:
            for (_, value), first in zip(named, start, strict=True):
                value.copy_(first)
    if len(still) == len(named):
        raise ModelError(f"training moves no parameter of the model: {_listed(still)}; {_UNUSED}")
    return tuple(still)


def still_warnings(still: Sequence[StillParameter]) -> list[str]:
    """Return one warning for each reason why some trainable parameters never change in training."""
    by_reason: dict[str, list[StillParameter]] = {}
    for parameter in still:
        by_reason.setdefault(parameter.reason, []).append(parameter)
    return [
        f"training does not move {_listed(parts)} on public examples: {reason}"
        for reason, parts in by_reason.items()
    ]


def _gradients(
    model: nn.Module,
    loss: PerExampleLoss,
    features: Tensor,
    targets: Tensor,
    named: Sequence[tuple[str, nn.Parameter]],
) -> Sequence[Tensor | None]:
    value = loss(model(features), targets).mean()
    if not value.requires_grad:
        return [None] * len(named)
    return torch.autograd.grad(value, [parameter for _, parameter in named], allow_unused=True)


def _reason(model: nn.Module, name: str, *, used: bool, gradient: bool, lr: float) -> str:
    if gradient:
        return (
            f"a step with local.optimizer.lr = {lr:g} is smaller than the precision of its values; "
            "raise lr"
        )
    if not used:
        return _UNUSED
    layer = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
    if isinstance(layer, AdaptedLayer):
        return (
            "its gradient is 0, as where both factors of an adapter are 0, or the layers behind it "
            "pass no gradient; start one factor from other values, or leave the layer out of "
            "model.lora.targets"
        )
    return (
        "its gradient is 0, as behind a weight of 0 or an activation that is always off; start it "
        "from other values, scale the features, or exclude it by model.freeze"
    )


def _listed(still: Sequence[StillParameter]) -> str:
    names = ", ".join(repr(parameter.name) for parameter in still[:_MAX_NAMES])
    return f"{names} and {len(still) - _MAX_NAMES} more" if len(still) > _MAX_NAMES else names
