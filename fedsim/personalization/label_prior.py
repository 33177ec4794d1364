"""Personal models that know a client's own share of each class."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from fedsim.clients.gradients.interface import PerExampleLoss
from fedsim.clients.training.streams import StreamKey
from fedsim.personalization.errors import PersonalizationError
from fedsim.personalization.settings import LabelPriorSettings


class ShiftedLogits(nn.Module):
    """A classifier with a constant added to the logit of each class.

    Args:
        model: gives logits (batch, classes).
        shift: added to them (classes,).
    """

    shift: Tensor

    def __init__(self, model: nn.Module, shift: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shifted logits (batch, classes)."""
        return self.model(x) + self.shift


class LabelPrior:
    """Adds log(own share / global share) to the logit of each class.

    Where clients differ in how often a class occurs and in nothing else, this makes the posterior
    of the global model that of the client, by Bayes' theorem.
    """

    def __init__(self, settings: LabelPriorSettings) -> None:
        self._settings = settings

    def __call__(
        self, model: nn.Module, loss: PerExampleLoss, x: Tensor, y: Tensor, key: StreamKey
    ) -> nn.Module:
        """Return a personal model; see `Personalizer`. Loss and key are not used."""
        personal = deepcopy(model).eval()
        with torch.no_grad():
            classes = personal(x[:1]).shape[-1]
        shift = self._shift(y, classes)
        like = next(personal.parameters(), shift)
        return ShiftedLogits(personal, shift.to(like))

    def _shift(self, y: Tensor, classes: int) -> Tensor:
        prior = self._settings.global_prior or [1.0] * classes
        if len(prior) != classes or y.ndim != 1 or y.is_floating_point():
            raise PersonalizationError(
                f"personalization: label_prior shifts one logit for each class; the model has "
                f"{classes} outputs, global_prior {len(prior)} shares, targets {y.dtype} of shape "
                f"{tuple(y.shape)}; give a share for each class, or use fine_tune"
            )
        counts = torch.bincount(y, minlength=classes).double() + self._settings.smoothing
        shares = torch.tensor(prior, dtype=torch.float64, device=y.device)
        return (counts / counts.sum()).log() - (shares / shares.sum()).log()
