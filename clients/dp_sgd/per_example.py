"""The sum of clipped per-example gradients, behind one interface.

The loss of example i is `loss(model(x_i), y_i)` with the example alone in its batch. No example's
gradient can therefore depend on another example, whatever the model or the loss computes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.clients.dp_sgd.clipping import FlatClipping

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]


class PerExampleGradients(ABC):
    """Computes sums of clipped per-example gradients of a model's trainable parameters."""

    def __init__(self, model: nn.Module, loss: PerExampleLoss) -> None:
        self._model = model
        self._loss = loss
        self.parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def size(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @abstractmethod
    def clipped_sum(self, features: Tensor, targets: Tensor, clipping: FlatClipping) -> Tensor:
        """Return the sum of the clipped gradients of n ≥ 0 examples, flat (size,)."""

    def _zeros(self) -> Tensor:
        parameter = next(iter(self.parameters.values()))
        return torch.zeros(self.size, dtype=parameter.dtype, device=parameter.device)

    def _example_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(self._model, parameters, (x.unsqueeze(0),))
        return self._loss(outputs, y.unsqueeze(0)).sum()


class VmapGradients(PerExampleGradients):
    """All gradients of a lot at once by `torch.func.vmap`; needs a vectorisable model."""

    def clipped_sum(self, features: Tensor, targets: Tensor, clipping: FlatClipping) -> Tensor:
        """Return the sum of the clipped gradients of n ≥ 0 examples, flat (size,)."""
        if len(features) == 0:
            return self._zeros()
        detached = {name: parameter.detach() for name, parameter in self.parameters.items()}
        example_gradient: Callable[..., Any] = grad(self._example_loss)
        gradients = vmap(example_gradient, in_dims=(None, 0, 0), randomness="different")(
            detached, features, targets
        )
        flat = torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)
        norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
        coefficients = clipping.coefficients(norms)
        # 0 · NaN is NaN: a refused row has to be emptied, not only multiplied by zero.
        flat = torch.where(torch.isfinite(norms).unsqueeze(1), flat, torch.zeros_like(flat))
        return coefficients.to(flat.dtype) @ flat


class LoopGradients(PerExampleGradients):
    """One example at a time by plain autograd: the reference, for any model."""

    def clipped_sum(self, features: Tensor, targets: Tensor, clipping: FlatClipping) -> Tensor:
        """Return the sum of the clipped gradients of n ≥ 0 examples, flat (size,)."""
        total = self._zeros()
        parameters = list(self.parameters.values())
        for x, y in zip(features, targets, strict=True):
            value = self._example_loss(dict(self.parameters), x, y)
            gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
            if torch.isfinite(norm):
                total += clipping.coefficients(norm.unsqueeze(0)).to(flat.dtype) * flat
        return total


def gradients_for(
    model: nn.Module, loss: PerExampleLoss, features: Tensor, targets: Tensor
) -> PerExampleGradients:
    """Return the fastest backend that this model and loss allow.

    The trial runs on zeros in the shape of the data, never on the data: which backend is chosen
    cannot depend on an example.
    """
    backend = VmapGradients(model, loss)
    x, y = (
        torch.zeros_like(features[:1]).expand(2, *features.shape[1:]),
        torch.zeros_like(targets[:1]).expand(2, *targets.shape[1:]),
    )
    try:
        backend.clipped_sum(x, y, FlatClipping(1.0))
    except (RuntimeError, NotImplementedError):
        # Data-dependent control flow, in-place writes, operations without a batching rule.
        return LoopGradients(model, loss)
    return backend
