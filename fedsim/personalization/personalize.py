"""Computation of personal models on the clients, and scores of these models on public data.

No ε covers a score on private examples. So a run computes scores only if the experiment declares
its data public. The scores are computed after the last round and are not part of any message.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.training.member import StreamKey
from fedsim.core.plugin_errors import plugin_calls
from fedsim.core.settings import first_mistake
from fedsim.core.streams import Purpose, stream_key, torch_seed
from fedsim.core.text_formats import finite_or_none
from fedsim.data import DataError, Examples, FederatedData
from fedsim.models.losses import resolve_loss
from fedsim.models.tasks import Task, device_of, evaluate
from fedsim.personalization.methods import PersonalizationError, personal_model
from fedsim.personalization.settings import LabelPriorSettings, PersonalizationSettings


def personal_key(seed: int, client: int) -> StreamKey:
    """Return the key of the random streams for a client's personal model; rounds use other keys."""
    return StreamKey(torch_seed(stream_key(seed, Purpose.PERSONALIZATION)), client, 0)


def personalize(
    model: nn.Module,
    x: ArrayLike | Tensor,
    y: ArrayLike | Tensor,
    settings: PersonalizationSettings | Mapping[str, Any],
    *,
    loss: str | PerExampleLoss = "cross_entropy",
    seed: int = 0,
    client: int = 0,
) -> nn.Module:
    """Return a client's personal model, made from the global model and the client's examples.

    The personal model is in eval mode.

    No noise is added: no ε covers the personal model or a score of it. Both must stay with the
    client.

    Args:
        model: the final global model of a run, from `fedsim.load_model`; it does not change.
        x: features of the client's examples (n, ...), the inputs of the model.
        y: targets of the client's examples (n, ...): whole numbers for classes.
        settings: the section `personalization` of an experiment, or a mapping with its keys.
        loss: a built-in name, or a callable that returns one value per example.
        seed: seed of the random order of examples.
        client: number of the client, which also determines that order.

    Raises:
        PersonalizationError: the settings or the examples do not fit the model.
        ModelError: there is no loss of that name.
    """
    chosen = _checked(settings)
    loss_function = resolve_loss(loss, Path()) if isinstance(loss, str) else loss
    features, targets = _tensor(x, "x", model), _tensor(y, "y", model)
    if len(features) != len(targets) or len(features) == 0:
        raise PersonalizationError(
            f"x and y need one row for each of at least 1 example, got {len(features)} and "
            f"{len(targets)}"
        )
    key = personal_key(seed, client)
    failed = "personalize (x needs inputs of the model, and y targets of the loss) failed"
    with plugin_calls(failed, raises=PersonalizationError):
        return personal_model(chosen, model, loss_function, features, targets, key).eval()


def check_personalization(
    settings: PersonalizationSettings, model: nn.Module, loss: PerExampleLoss, x: Tensor, y: Tensor
) -> None:
    """Make one personal model on public examples, so that mistakes are found before round 1.

    Args:
        settings: the section `personalization` of the experiment.
        model: the initial model.
        loss: the loss, which returns one value per example.
        x: features of public examples (n, ...).
        y: targets of these examples (n, ...).

    Raises:
        PersonalizationError: the settings do not fit the model.
    """
    if not isinstance(settings, LabelPriorSettings):
        settings = settings.model_copy(update={"steps": 1})
    personal_model(settings, model, loss, x, y, personal_key(0, 0))


def _checked(settings: PersonalizationSettings | Mapping[str, Any]) -> PersonalizationSettings:
    if not isinstance(settings, Mapping):
        return settings
    try:
        return TypeAdapter(PersonalizationSettings).validate_python(dict(settings))
    except ValidationError as error:
        raise PersonalizationError(first_mistake(error, "personalization")) from error


def _tensor(values: ArrayLike | Tensor, name: str, model: nn.Module) -> Tensor:
    """Return values on the model's device: whole numbers as int64, others in the model's type."""
    try:
        tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise PersonalizationError(f"{name} must be an array of numbers: {error}") from error
    if tensor.ndim == 0:
        raise PersonalizationError(f"{name} must have a row for each example, got one number")
    like = next(model.parameters(), torch.empty(0))
    return tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device, torch.int64)


def score_clients(
    settings: PersonalizationSettings,
    model: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    data: FederatedData,
    *,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Yield each client's entry of `personalization.json`; personal models are not kept.

    An entry has the number of the client, its numbers of training and held-out `examples`, and the
    metrics of the global and the personal model on the held-out examples. Without held-out examples
    there are no metrics. R² is left out, as its baseline is the mean of the client's targets.

    Args:
        settings: the section `personalization` of the experiment; `public_data` must be true.
        model: the final global model, on its device.
        loss: the loss, which returns one value per example.
        task: the task, which computes the metrics.
        data: the clients' examples, with a holdout.
        seed: the experiment's seed.

    Raises:
        DataError: the data are not declared public, or there is no holdout.
    """
    if not settings.public_data or data.held_out is None:
        raise DataError(
            "scores of personal models need public data: set personalization.public_data: true "
            "and a holdout, if all examples are public"
        )

    def scores(scored: nn.Module, examples: Examples) -> dict[str, float | None]:
        metrics = evaluate(scored, loss, task, examples) if len(examples) else {}
        return {name: finite_or_none(value) for name, value in metrics.items() if name != "r2"}

    for client, examples in enumerate(data.clients):
        rest, personal = data.held_out[client], model
        if len(examples) and len(rest):
            x, y = torch.from_numpy(examples.features), torch.from_numpy(examples.targets)
            x, y = (values.to(device_of(model)) for values in (x, y))
            personal = personal_model(settings, model, loss, x, y, personal_key(seed, client))
        yield {
            "client": client,
            "examples": len(examples),
            "held_out": len(rest),
            "global": scores(model, rest),
            "personal": scores(personal, rest),
        }
