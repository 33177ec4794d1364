"""Sums of clipped per-example gradients: the interface of all ways to compute them."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call

from fedsim.clients.dp_sgd.clipping import Clipping, Groups
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.clip_factors import LotFactors, LotStatistics, lot_factors
from fedsim.core.errors import FedsimError

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (batch, ...) and targets (batch, ...) to losses (batch,)."""


class UncoveredParameterError(FedsimError, RuntimeError):
    """A model used parameters in a way that book-keeping has no rule for.

    Attributes:
        indices: the parameters, by index.
    """

    def __init__(self, message: str, indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.indices = indices


class PerExampleGradients(ABC):
    """Computes sums of clipped per-example gradients of a model's trainable parameters.

    Args:
        model: its trainable parameters become views of `parameters.data`.
        loss: one value per example, from outputs (n, ...) and targets (n, ...).
    """

    def __init__(
        self, model: nn.Module, loss: PerExampleLoss, *, parameters: FlatParameters | None = None
    ) -> None:
        self.model = model
        self.loss = loss
        self.parameters = FlatParameters(model) if parameters is None else parameters
        self._views: tuple[Tensor, list[Tensor]] | None = None

    def add_clipped_sum(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: Tensor,
        *,
        scale: float = 1.0,
    ) -> LotStatistics:
        """Add scale · Σ_i clip(gradient_i) of n ≥ 0 examples to the flat tensor `into` (size,).

        Guarantee: each example's part of what is added has an L2 norm of at most scale · C_m in
        each group m; examples whose gradient is not finite add nothing.
        """
        if features.shape[0] == 0:
            return LotStatistics(0, 0, (0,) * len(groups.bounds))
        if self._views is None or self._views[0] is not into:
            self._views = (into, self.parameters.views(into))
        return self._add(features, targets, clipping, groups, self._views[1], scale)

    @abstractmethod
    def _add(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: list[Tensor],
        scale: float,
    ) -> LotStatistics:
        """As `add_clipped_sum` for n ≥ 1 examples, into one view for each parameter."""

    @abstractmethod
    def gradients(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples."""

    def _lot_factors(
        self,
        squared_norms: dict[int, Tensor],
        examples: int,
        clipping: Clipping,
        groups: Groups,
        scale: float,
    ) -> LotFactors:
        like = self.parameters.tensors[0]
        return lot_factors(squared_norms, examples, clipping, groups, scale=scale, like=like)

    def _example_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(self.model, parameters, (x.unsqueeze(0),))
        return self.loss(outputs, y.unsqueeze(0)).sum()
