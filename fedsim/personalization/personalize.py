"""A client's personal model, made on its own machine from the global model, and its scores.

No ε covers a score on private examples, so nothing here is called unless the experiment declares
its data public. The scores are computed after the last round and enter no message.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.training.streams import StreamKey
from fedsim.core.streams import Purpose, stream_key, torch_seed
from fedsim.data import DataError, Examples, FederatedData
from fedsim.models.losses import resolve_loss
from fedsim.models.tasks import Task, evaluate
from fedsim.personalization.methods import Ditto, FineTune, LabelPrior, PersonalizationError
from fedsim.personalization.settings import (
    DittoSettings,
    FineTuneSettings,
    LabelPriorSettings,
    PersonalizationSettings,
)


class Personalizer(Protocol):
    """A method that makes personal models."""

    def __call__(
        self, model: nn.Module, loss: PerExampleLoss, x: Tensor, y: Tensor, key: StreamKey
    ) -> nn.Module:
        """Return a personal model; the global one stays as it is.

        Args:
            model: the global model.
            loss: one value per example.
            x: the client's examples (n, ...), n at least 1.
            y: their targets (n, ...).
            key: of the client's random streams.

        Raises:
            PersonalizationError: the settings do not fit the model.
        """
        ...


def method_of(settings: PersonalizationSettings) -> Personalizer:
    """Return the method that the settings name."""
    match settings:
        case FineTuneSettings():
            return FineTune(settings)
        case DittoSettings():
            return Ditto(settings)
        case LabelPriorSettings():
            return LabelPrior(settings)


def personal_key(seed: int, client: int) -> StreamKey:
    """Return the key of the streams of a client's personal model; no round uses them."""
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
    """Return a client's personal model, in eval mode, made from a global model and own examples.

    No noise is added: no ε covers the result, nor a score of it. Both are for the client alone.

    Args:
        model: the final global model of a run, as `fedsim.load_model` gives it; it stays as it is.
        x: the client's examples (n, ...), as the model takes them.
        y: their targets (n, ...): whole numbers for classes.
        settings: the section `personalization:` of an experiment, or a mapping like it.
        loss: a built-in name, or a callable that returns one value per example.
        seed: seed of the order in which examples are used.
        client: number of the client, for the same purpose.

    Raises:
        PersonalizationError: the settings or the examples do not fit the model.
        ModelError: there is no loss of that name.
    """
    chosen = _checked(settings)
    found = resolve_loss(loss, Path()) if isinstance(loss, str) else loss
    features, targets = _tensor(x, "x", model), _tensor(y, "y", model)
    if len(features) != len(targets) or len(features) == 0:
        raise PersonalizationError(
            f"x and y need one row for each of at least 1 example, got {len(features)} and "
            f"{len(targets)}"
        )
    key = personal_key(seed, client)
    return method_of(chosen)(model, found, features, targets, key).eval()


def check_personalization(
    settings: PersonalizationSettings, model: nn.Module, loss: PerExampleLoss, x: Tensor, y: Tensor
) -> None:
    """Make one personal model on public examples, so that mistakes are known before round 1.

    Args:
        settings: how a personal model is made.
        model: the initial model.
        loss: one value per example.
        x: public examples (n, ...).
        y: their targets (n, ...).

    Raises:
        PersonalizationError: the settings do not fit the model.
    """
    if not isinstance(settings, LabelPriorSettings):
        settings = settings.model_copy(update={"steps": 1})
    method_of(settings)(model, loss, x, y, personal_key(0, 0))


def _checked(settings: PersonalizationSettings | Mapping[str, Any]) -> PersonalizationSettings:
    if not isinstance(settings, Mapping):
        return settings
    try:
        return TypeAdapter(PersonalizationSettings).validate_python(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("personalization", *first["loc"])))
        raise PersonalizationError(f"{place}: {first['msg']}") from error


def _tensor(values: ArrayLike | Tensor, name: str, model: nn.Module) -> Tensor:
    """Return values as a tensor where the model is: whole numbers in int64, others in its type."""
    try:
        found = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise PersonalizationError(f"{name} must be an array of numbers: {error}") from error
    if found.ndim == 0:
        raise PersonalizationError(f"{name} must have a row for each example, got one number")
    like = next(model.parameters(), torch.empty(0))
    return found.to(like) if found.is_floating_point() else found.to(like.device, torch.int64)


Scores = Mapping[str, float]


@dataclass(frozen=True)
class ClientScores:
    """Scores of one client.

    Attributes:
        client: its number.
        examples: examples that it trained on.
        held_out: examples that it never trained on; at 0 there are no scores.
        global_model: metrics of the global model on its held-out examples.
        personal_model: metrics of its personal model there.
    """

    client: int
    examples: int
    held_out: int
    global_model: Scores
    personal_model: Scores


@dataclass(frozen=True)
class ScoredModel:
    """What scores are computed with.

    Attributes:
        model: the final global model, on its device.
        loss: one value per example.
        task: its metrics. R² is left out: its baseline is the mean of the client's own targets.
    """

    model: nn.Module
    loss: PerExampleLoss
    task: Task

    def scores(self, model: nn.Module, examples: Examples) -> Scores:
        """Return the metrics of a model of the same kind."""
        if len(examples) == 0:
            return {}
        found = evaluate(model, self.loss, self.task, examples)
        return {name: value for name, value in found.items() if name != "r2"}


def score_clients(
    settings: PersonalizationSettings, scored: ScoredModel, data: FederatedData, *, seed: int
) -> Iterator[ClientScores]:
    """Yield the scores of each client, whose personal models are then forgotten.

    Args:
        settings: how a personal model is made; `public_data` must be declared.
        scored: the global model, its loss and its metrics.
        data: the clients' examples, with held-out ones.
        seed: the experiment's seed.

    Raises:
        DataError: the data are not declared to be public, or nothing is held out.
    """
    if not settings.public_data or data.held_out is None:
        raise DataError(
            "scores of personal models need public data: set personalization.public_data: true "
            "and a holdout, if all examples are public"
        )
    method, device = method_of(settings), _device_of(scored.model)
    for client, own in enumerate(data.clients):
        rest, personal = data.held_out[client], scored.model
        if len(own) and len(rest):
            x, y = (torch.from_numpy(part).to(device) for part in (own.features, own.targets))
            personal = method(scored.model, scored.loss, x, y, personal_key(seed, client))
        yield ClientScores(
            client=client,
            examples=len(own),
            held_out=len(rest),
            global_model=scored.scores(scored.model, rest),
            personal_model=scored.scores(personal, rest),
        )


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
