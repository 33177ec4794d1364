"""Scores of global and personal models on clients' own held-out examples, for public data only.

No ε covers a score on private examples, so nothing here is called unless the experiment declares
its data public. The scores are computed after the last round and enter no message.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.data import DataError, Examples, FederatedData
from fedsim.models.metrics import Task, evaluate
from fedsim.personalization.personalize import method_of, personal_key
from fedsim.personalization.settings import PersonalizationSettings

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
