"""Methods that make personal models: fine-tuning, Ditto, and adjustment to class frequencies."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.training.member import StreamKey
from fedsim.clients.training.plain import train_by_torch
from fedsim.clients.training.shared_model import LocalOptimizer
from fedsim.core.errors import InputError, raised_as
from fedsim.models.adapters import matching
from fedsim.personalization.settings import (
    DittoSettings,
    FineTuneSettings,
    LabelPriorSettings,
    PersonalizationSettings,
)


class PersonalizationError(InputError):
    """Raised if settings or examples do not fit the model; the message is one line with the fix."""


def personal_model(
    settings: PersonalizationSettings,
    model: nn.Module,
    loss: PerExampleLoss,
    x: Tensor,
    y: Tensor,
    key: StreamKey,
) -> nn.Module:
    """Return a client's personal model; the global model does not change.

    | method      | personal model v, made from the final global model w                      |
    |-------------|---------------------------------------------------------------------------|
    | fine_tune   | gradient steps from w on the client's examples                            |
    | ditto       | gradient steps from w on the client's loss + λ/2 · ‖v − w‖²               |
    | label_prior | w with log(client's share / global share) added to the logit of each class |

    ditto has the personal objective of Li et al. 2021 ("Ditto: Fair and Robust Federated Learning
    Through Personalization", equation 1). The paper minimises it in every round, with the global
    model of that round. fedsim minimises it once, after the last round. The objective is the same,
    and the rounds do not depend on personal models.

    If clients differ only in the frequencies of classes, label_prior turns the posterior of the
    global model into the client's posterior, by Bayes' theorem.

    Args:
        settings: the section `personalization` of the experiment.
        model: the global model.
        loss: the loss, which returns one value per example; label_prior does not use it.
        x: features of the client's examples (n, ...), n at least 1.
        y: targets of the client's examples (n, ...).
        key: key of the client's random streams; label_prior draws nothing.

    Raises:
        PersonalizationError: the settings do not fit the model.
    """
    personal = deepcopy(model)
    if isinstance(settings, LabelPriorSettings):
        return _with_prior(personal.eval(), settings, x, y)
    if isinstance(settings, FineTuneSettings) and settings.parameters is not None:
        _train_only(personal, settings.parameters)
    weight = settings.proximal_weight if isinstance(settings, DittoSettings) else 0.0
    local = LocalSettings(steps=settings.steps, batch_size=settings.batch_size)
    optimizer = ProximalDescent(settings.lr, weight)
    train_by_torch(personal, loss, x, y, local, key, optimizer=optimizer)
    return personal


class ProximalDescent(LocalOptimizer):
    """An optimizer: gradient descent with a penalty on the distance to the initial values w.

    With gradient g, a step takes the values to v ← v − η g, then to the u that minimises
    λ/2 ‖u − w‖² + 1/(2η) ‖u − v‖². The minimum is exact, so steps are stable for every λ. λ = 0 is
    gradient descent.

    Args:
        lr: learning rate η.
        proximal_weight: weight λ of the penalty.
    """

    def __init__(self, lr: float, proximal_weight: float) -> None:
        self._lr = lr
        self._pull = lr * proximal_weight / (1.0 + lr * proximal_weight)
        self._start: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take one optimizer step and change `values` in place."""
        if self._start is None:
            self._start = [value.detach().clone() for value in values]
        for value, gradient, start in zip(values, gradients, self._start, strict=True):
            value.add_(gradient, alpha=-self._lr)
            if self._pull:
                value.lerp_(start, self._pull)


def _train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all trained parameters except those that match a pattern."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with raised_as(PersonalizationError):
        names = matching(patterns, trained, "personalization.parameters", "trainable parameter")
    for name, parameter in trained.items():
        parameter.requires_grad_(name in names)


class ShiftedLogits(nn.Module):
    """A classifier that adds a constant to the logit of each class of another classifier.

    Args:
        model: the other classifier, with logits (batch, classes).
        shift: constant added to the logits (classes,).
    """

    shift: Tensor

    def __init__(self, model: nn.Module, shift: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shifted logits (batch, classes)."""
        return self.model(x) + self.shift


@torch.no_grad()
def _with_prior(model: nn.Module, settings: LabelPriorSettings, x: Tensor, y: Tensor) -> nn.Module:
    """Return a model whose logits are shifted to the client's class frequencies."""
    classes = model(x[:1]).shape[-1]
    prior = settings.global_prior or [1.0] * classes
    if len(prior) != classes or y.ndim != 1 or y.is_floating_point():
        raise PersonalizationError(
            f"personalization: label_prior shifts one logit for each class; the model has "
            f"{classes} outputs, global_prior {len(prior)} shares, targets {y.dtype} of shape "
            f"{tuple(y.shape)}; give a share for each class, or use fine_tune"
        )
    counts = torch.bincount(y, minlength=classes).double() + settings.smoothing
    shares = torch.tensor(prior, dtype=torch.float64, device=y.device)
    shift = (counts / counts.sum()).log() - (shares / shares.sum()).log()
    return ShiftedLogits(model, shift.to(next(model.parameters(), shift)))
