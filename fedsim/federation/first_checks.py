"""Checks before round 1: an algorithm keeps its declaration, and training moves the model.

Noise moves every parameter, so a private run shows no sign of a layer that learns nothing. Here two
steps of plain SGD are taken on public examples, without noise, and undone. Two, since the factor A
of a low-rank adapter has a gradient once B is no longer 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsim.algorithms.algorithm import Algorithm, Training
from fedsim.algorithms.catalog import algorithms
from fedsim.algorithms.registry import AlgorithmError, algorithm_for, check_algorithm
from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.local_settings import SgdSettings
from fedsim.clients.model_checks.safety import preserve_state
from fedsim.experiment import Experiment
from fedsim.experiment.rules.algorithm import check_declaration
from fedsim.experiment.rules.sections import Sections
from fedsim.federation.schedule import participation_of
from fedsim.models.adapters import AdaptedLayer
from fedsim.models.catalog import ModelError
from fedsim.models.local_base import trained_names
from fedsim.protocol.arrays import to_arrays


def algorithm_of(
    experiment: Experiment, model: nn.Module, num_clients: int, base: Path
) -> Algorithm:
    """Return a new object of the experiment's algorithm.

    Args:
        experiment: the settings.
        model: the global model; the algorithm changes its trained parameters.
        num_clients: N.
        base: the directory in which relative paths start.

    Raises:
        AlgorithmError: there is no such algorithm, or it does not take its settings.
    """
    optimizer = experiment.local.optimizer
    training = Training(
        parameters=frozenset(trained_names(model)),
        num_clients=num_clients,
        learning_rate=experiment.local.learning_rate,
        momentum=optimizer.momentum if isinstance(optimizer, SgdSettings) else 0.0,
    )
    return algorithm_for(experiment.federation.algorithm, base=base, training=training)


def checked_algorithm(
    experiment: Experiment, model: nn.Module, num_clients: int, base: Path
) -> Algorithm:
    """Return the experiment's algorithm; one of the user's own is tried on the initial model.

    Args:
        experiment: the settings.
        model: the initial model.
        num_clients: N.
        base: the directory in which relative paths start.

    Raises:
        AlgorithmError: as `algorithm_of`, a call fails, or it cannot go with the settings.
    """
    algorithm, name = (
        algorithm_of(experiment, model, num_clients, base),
        experiment.federation.algorithm.name,
    )
    if name not in algorithms():  # of a built-in one the rules of the file know it
        sections = Sections(
            data=experiment.data,
            model=experiment.model,
            federation=experiment.federation,
            privacy=experiment.privacy,
            local=experiment.local,
            secure_aggregation=experiment.secure_aggregation,
        )
        for path, message in check_declaration(type(algorithm), experiment.federation, sections):
            raise AlgorithmError(f"{'.'.join(map(str, path))}: {message}")
        arrays = {key: value.cpu().numpy() for key, value in model.state_dict().items()}
        per_round, _ = participation_of(experiment, num_clients).round_sizes
        check_algorithm(algorithm, name, to_arrays(arrays), clients=per_round)
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
    """A trained parameter that two steps on public examples leave as it is.

    Attributes:
        name: of the parameter.
        reason: why, and what to change.
    """

    name: str
    reason: str


def still_parameters(
    model: nn.Module, loss: PerExampleLoss, features: Tensor, targets: Tensor, *, lr: float
) -> tuple[StillParameter, ...]:
    """Return the trained parameters that training does not move.

    Args:
        model: the initial model.
        loss: one value per example.
        features: public examples (n ≥ 1, ...).
        targets: their targets (n, ...).
        lr: the learning rate.

    Guarantee:
        the model's values, buffers and modes and the global random generators are unchanged.

    Raises:
        ModelError: no parameter moves, whatever the examples are, so that nothing would be learned:
            the outputs depend on none, or every step is below the precision. A gradient of 0 may be
            due to the public examples.
    """
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    named = [(name, value) for name, value in trained if value.numel()]
    start = [value.detach().clone() for _, value in named]
    was_used, had_gradient = [False] * len(named), [False] * len(named)
    with preserve_state(model):
        model.eval()
        try:
            for _ in range(_STEPS):
                for k, found in enumerate(_gradients(model, loss, features, targets, named)):
                    if found is None:
                        continue
                    was_used[k] = True
                    had_gradient[k] |= bool(found.any())
                    with torch.no_grad():
                        named[k][1].sub_(found.nan_to_num(), alpha=lr)
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
    model: nn.Module, loss: PerExampleLoss, features: Tensor, targets: Tensor, *, lr: float
) -> tuple[StillParameter, ...]:
    """Return the trained parameters that the losses do not depend on, by forward passes alone.

    Steps along random directions move all parameters, also those.

    Args:
        model: the initial model.
        loss: one value per example.
        features: public examples (n ≥ 1, ...).
        targets: their targets (n, ...).
        lr: not used.

    Guarantee:
        as of `still_parameters`.

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
    """Return a warning for each reason why trained parameters stay as they are."""
    by_reason: dict[str, list[StillParameter]] = {}
    for one in still:
        by_reason.setdefault(one.reason, []).append(one)
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
    names = ", ".join(repr(one.name) for one in still[:_MAX_NAMES])
    return f"{names} and {len(still) - _MAX_NAMES} more" if len(still) > _MAX_NAMES else names
