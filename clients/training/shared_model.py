"""Model in memory that the clients of one process share; each client starts from the global model.

The global model of a round is loaded, and its digest computed, once for all these clients.

The local optimizers are here, too. Their results are bitwise equal to those of torch.optim. They
use only parameters and gradients, so the same code trains one client or stacked parameters of
several. (Building torch's optimizer takes longer than a step of a small model, and about a second
the first time.)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from operator import is_

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedsim.clients.correlated_noise import NoiseStates
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import AdamSettings, OptimizerSettings, SgdSettings
from fedsim.protocol.arrays import digest, is_live
from fedsim.protocol.noisy_sums import CLIP_COUNT


class SharedModel:
    """Model in which all clients of a process train, one after the other.

    Args:
        model: the module to train; its trainable parameters become views of one flat tensor.
        parameters: flat layout of the parameters of `model`; None to create it.

    Attributes:
        start_values: trainable parameters of the global model as a flat tensor (size,). A new
            global model gets a new tensor.
        fixed_digest: digest of the arrays of the global model that are not trained; "" if all are.
    """

    def __init__(self, model: nn.Module, *, parameters: FlatParameters | None = None) -> None:
        self.model = model
        self.parameters = FlatParameters(model) if parameters is None else parameters
        tensors = self.parameters.tensors
        places = zip(tensors, self.parameters.slices(range(len(tensors))), strict=True)
        at = {id(tensor): (place, tensor.shape) for tensor, place in places}
        # Place in the flat tensor by name; tied parameters have several names and one place.
        named = model.named_parameters(remove_duplicate=False)
        self._places = {name: at[id(value)] for name, value in named if id(value) in at}
        state = model.state_dict().items()
        self._fixed = {name: v.detach() for name, v in state if name not in self._places}
        self._loaded: tuple[ArrayRecord, str] | None = None
        self.start_values: Tensor = self.parameters.data.clone()
        self.fixed_digest = ""
        self._fixed_values: list[tuple[Tensor, Tensor]] = []
        # A module may put another tensor in a buffer's place, or have buffers outside its state.
        self._buffers = [
            (module, name, tensor, tensor.clone())
            for module in model.modules()
            for name, tensor in module.named_buffers(recurse=False)
        ]

    @cached_property
    def noise_states(self) -> NoiseStates:
        """Cache of the state of each client's correlated noise."""
        return NoiseStates()

    @property
    def tied_names(self) -> dict[str, str]:
        """For each tensor with several names (tied), a map from further names to the first name."""
        first: dict[tuple[int, int], str] = {}
        owners = {
            name: first.setdefault((place.start, place.stop), name)
            for name, (place, _) in self._places.items()
        }
        return {name: owner for name, owner in owners.items() if owner != name}

    def load(self, arrays: ArrayRecord) -> str:
        """Load the global model for the clients and return its digest.

        Args:
            arrays: the arrays of the global model by name.

        Raises:
            RuntimeError: names or shapes differ from those of the model.
        """
        if self._loaded is not None and _is_same(self._loaded[0], arrays):
            return self._loaded[1]
        self._loaded = None
        self._put_buffers_back()
        state = {name: torch.from_numpy(np.array(a.numpy())) for name, a in arrays.items()}
        self.model.load_state_dict(state)
        self.start_values = self.parameters.data.clone()
        fixed = {name: array for name, array in arrays.items() if name not in self._places}
        self.fixed_digest = digest(ArrayRecord(fixed)) if fixed else ""
        self._fixed_values = [(tensor, tensor.clone()) for tensor in self._fixed.values()]
        found = digest(arrays)
        self._loaded = (arrays, found) if is_live(arrays) else None  # others may be changed
        return found

    def restart(self) -> None:
        """Reset the model to the global model, so that nothing of the previous client remains."""
        self.parameters.data.copy_(self.start_values)
        self._put_buffers_back()
        for tensor, value in self._fixed_values:
            tensor.copy_(value)

    def flat(self, arrays: ArrayRecord) -> Tensor:
        """Return arrays for the trained tensors as one flat tensor (size,).

        Args:
            arrays: one array for each trained tensor, by name; a tied tensor has several names.

        Raises:
            ValueError: names or shapes differ from those of the trained tensors.
        """
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        if shapes != self.trained_shapes:
            raise ValueError(f"arrays for {self.trained_shapes} are expected, got {shapes}")
        values = torch.empty_like(self.start_values)
        for name, (place, _) in self._places.items():
            values[place] = torch.from_numpy(np.array(arrays[name].numpy())).to(values).flatten()
        return values

    def _put_buffers_back(self) -> None:
        for module, name, tensor, first in self._buffers:
            setattr(module, name, tensor.copy_(first))

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each trained tensor, by name; a tied tensor occurs under each of its names."""
        return {name: tuple(shape) for name, (_, shape) in self._places.items()}

    def integers_of(
        self, released: np.ndarray, *, count: float | None = None
    ) -> dict[str, np.ndarray]:
        """Return a client's contribution to a noisy sum: int64 arrays by tensor name.

        Args:
            released: the contribution as whole numbers in float64, (size,).
            count: the client's noisy bit, as an integer, for an adaptive clip norm; or None.
        """
        whole = released.astype(np.int64)
        values = {
            name: whole[place].reshape(shape) for name, (place, shape) in self._places.items()
        }
        if count is not None:
            values[CLIP_COUNT] = np.array([count], dtype=np.int64)
        return values

    def upload_of(
        self, trained: np.ndarray, request: ArrayRecord, *, private: bool
    ) -> dict[str, np.ndarray]:
        """Return a trained model as arrays by name, with the names that the request uses.

        Args:
            trained: flat trained parameters (size,); the arrays use this memory, read-only.
            request: the global model from which the client started.
            private: whether buffers and frozen parameters are copied from the request. If not, they
                are copied from the client's model.
        """
        values: dict[str, np.ndarray] = {}
        trained = trained.view()
        trained.flags.writeable = False  # its views become read-only too
        for name, array in request.items():
            if name in self._places:
                place, shape = self._places[name]
                values[name] = trained[place].reshape(shape)
            elif private:
                values[name] = array.numpy()
            else:
                values[name] = self._fixed[name].cpu().numpy().copy()
        return values


def _is_same(record: ArrayRecord, other: ArrayRecord) -> bool:
    """Return whether a record holds the same read-only arrays as a record of read-only arrays."""
    if record is other:
        return True
    if list(record.keys()) != list(other.keys()):
        return False
    return all(map(is_, record.values(), other.values())) and is_live(other)


_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class LocalOptimizer(ABC):
    """Base class of the optimizers of local training, which update parameters in place."""

    @abstractmethod
    def step(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update the parameters in place by one step; `gradients` may be overwritten.

        Args:
            values: the parameters, detached; they must be the same tensors in every step.
            gradients: gradient of each parameter, in the parameter's shape.
        """


class Sgd(LocalOptimizer):
    """SGD as torch.optim.SGD without dampening: v ← μ v + (g + λ w), w ← w − η v.

    w is the parameter, g its gradient, μ the momentum, λ the weight decay and η the learning rate.
    """

    def __init__(self, settings: SgdSettings) -> None:
        self._settings = settings
        self._velocities: list[Tensor] | None = None

    def step(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update the parameters in place by one step; `gradients` may be overwritten."""
        settings = self._settings
        if settings.weight_decay:
            for value, gradient in zip(values, gradients, strict=True):
                gradient.add_(value, alpha=settings.weight_decay)
        if settings.momentum:
            if self._velocities is None:
                self._velocities = [gradient.clone() for gradient in gradients]
            else:
                for velocity, gradient in zip(self._velocities, gradients, strict=True):
                    velocity.mul_(settings.momentum).add_(gradient)
            gradients = self._velocities
        for value, gradient in zip(values, gradients, strict=True):
            value.add_(gradient, alpha=-settings.lr)


class Adam(LocalOptimizer):
    """Optimizer Adam (Kingma and Ba 2015), or AdamW with decoupled weight decay, as in torch."""

    def __init__(self, settings: AdamSettings) -> None:
        self._settings = settings
        self._steps = 0
        self._moments: list[tuple[Tensor, Tensor]] = []

    def step(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update the parameters in place by one step; `gradients` may be overwritten."""
        if not self._moments:
            self._moments = [(torch.zeros_like(v), torch.zeros_like(v)) for v in values]
        self._steps += 1
        corrections = [1 - beta**self._steps for beta in _BETAS]
        settings = self._settings
        for value, gradient, (first, second) in zip(values, gradients, self._moments, strict=True):
            if settings.weight_decay and settings.name == "adamw":
                value.mul_(1 - settings.lr * settings.weight_decay)
            elif settings.weight_decay:
                gradient.add_(value, alpha=settings.weight_decay)
            first.lerp_(gradient, 1 - _BETAS[0])
            second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            scale = (second.sqrt() / math.sqrt(corrections[1])).add_(_EPSILON)
            value.addcdiv_(first, scale, value=-settings.lr / corrections[0])


def make_optimizer(settings: OptimizerSettings) -> LocalOptimizer:
    """Create the optimizer that the settings name, without momentum or state of earlier rounds."""
    return Sgd(settings) if isinstance(settings, SgdSettings) else Adam(settings)
