"""The gradients of an experiment's model and the model that clients share, in one process."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fedsim.clients.gradients.choice import training_gradients
from fedsim.clients.gradients.interface import PerExampleGradients, PerExampleLoss
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.training.shared_model import SharedModel
from fedsim.clients.zeroth_order.shared_model import SharedCoefficients
from fedsim.clients.zeroth_order.slopes import Slopes
from fedsim.experiment import Experiment
from fedsim.federation.movement import StillParameter, parameters_without_effect, still_parameters
from fedsim.models.local_base import local_base
from fedsim.models.rebuilt import RebuiltModel


@dataclass(frozen=True)
class TrainedParts:
    """What clients train with.

    Attributes:
        gradients: of the model; None: by torch, without privacy.
        shared_model: the model as all clients of the process train it in turn.
        still_parameters: finds the trained parameters that training does not move.
    """

    gradients: PerExampleGradients | None
    shared_model: SharedModel
    still_parameters: Callable[..., tuple[StillParameter, ...]] = still_parameters


def trained_parts(
    experiment: Experiment,
    model: nn.Module,
    loss: PerExampleLoss,
    features: Tensor,
    targets: Tensor,
) -> TrainedParts:
    """Return the gradients of a model, and the model that clients share.

    Args:
        experiment: the settings.
        model: the initial model, on the training device.
        loss: one value per example.
        features: a few public examples (n ≥ 1, ...).
        targets: their targets.

    Raises:
        UnsafeModelError: gradients are clipped, and examples are coupled.
    """
    base, private = local_base(model), experiment.release_kind.draws_lots
    if isinstance(base, RebuiltModel):
        # Their tiles are checked bit for bit (`RowIsolation`), by forward passes.
        slopes = Slopes(model, loss, base.directions)
        shared_model = SharedCoefficients(slopes, experiment.local.given_steps)
        return TrainedParts(slopes, shared_model, parameters_without_effect)
    gradients = training_gradients(model, loss, features, targets, private=private)
    parameters = None if gradients is None else gradients.parameters
    return TrainedParts(gradients, SharedModel(model, parameters=parameters))


def release_parameters(
    experiment: Experiment, gradients: PerExampleGradients | None, shared_model: SharedModel
) -> FlatParameters:
    """Return the parameters that one release is of: those of a step, or of a whole update.

    Args:
        experiment: the settings.
        gradients: of the model.
        shared_model: the model that clients share.
    """
    if experiment.release_kind.draws_lots and isinstance(gradients, Slopes):
        return gradients.parameters
    return shared_model.parameters
