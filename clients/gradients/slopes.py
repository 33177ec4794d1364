"""Per-example slopes of the loss along public directions, from forward passes only.

A slope depends on one example only. So an example's P slopes can be clipped and summed like a
gradient of P values, with noise added to the sum. This is a DP-SGD step on a model of P values.
Directions do not depend on data, and the update along them is post-processing of the noisy slopes.

Source: Zhang et al. 2024, "DPZero: Private Fine-Tuning of Language Models without Backpropagation"
(arXiv:2310.09639); Tang et al. 2024, "Private Fine-tuning of Large Language Models with
Zeroth-order Optimization" (arXiv:2401.04343).
"""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedsim.clients.gradients.layers.base import ExampleUse
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import PaddedBatch, PerExampleGradients, PerExampleLoss
from fedsim.clients.training.shared_model import SharedModel
from fedsim.protocol.arrays import COEFFICIENTS, digest
from fedsim.zeroth_order.directions import Directions


class _Coefficients(nn.Module):
    """A module with the coefficients as its only parameter, for plans and clipping."""

    def __init__(self, *shape: int, like: Tensor) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(like.new_zeros(shape))


def coefficients_of(*shape: int, like: Tensor) -> FlatParameters:
    """Return the flat parameters of a model whose only parameter is a tensor of zeros.

    The tensor holds the coefficients of random directions, which take the place of parameters.

    Args:
        shape: shape of the coefficients.
        like: tensor whose dtype and device the coefficients get.
    """
    return FlatParameters(_Coefficients(*shape, like=like))


class Slopes(PerExampleGradients):
    """Per-example slopes of the loss along public directions, used in place of gradients.

    A slope is the central difference of two losses around the model's current parameters. Dropout
    is off, so both losses come from the same function.

    Args:
        model: the model; its trained parameters become views of one flat tensor, `point`.
        loss: function of (outputs, targets) that returns one value per example.
        directions: the public random directions of the experiment.

    Attributes:
        parameters: layout of the P coefficients of a step, one for each of P directions.
        point: the model's trained parameters (d,), where slopes are measured.
    """

    def __init__(self, model: nn.Module, loss: PerExampleLoss, directions: Directions) -> None:
        self.point = FlatParameters(model)
        self.directions = directions
        number = directions.settings.directions
        super().__init__(model, loss, parameters=coefficients_of(number, like=self.point.data))
        self._now = (0, 0)
        self._before: tuple[slice, Tensor] | None = None

    def begin_step(self, round_number: int, step: int, values: Tensor) -> slice:
        """Move the model by the update of the previous step, and return the columns of this step.

        Args:
            round_number: the round, from 1.
            step: number of the step in the round, from 0.
            values: coefficients of the round's K steps with P directions each, (1, K · P).

        Returns:
            Slice of the P columns of `values` that hold the coefficients of this step.
        """
        size = self.parameters.size
        if step and self._before is not None:
            place, earlier = self._before
            moved = (values[0, place] - earlier).tolist()
            for number, coefficient in enumerate(moved):
                if coefficient:
                    self.point.data.add_(self._direction(number), alpha=coefficient)
        start = step * size % values.shape[1]  # a probe takes more steps than a round
        place = slice(start, start + size)
        self._now, self._before = (round_number, step), (place, values[0, place].clone())
        return place

    @torch.no_grad()
    def slopes(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the slopes (n, P) of the losses of n examples along P directions.

        Args:
            features: features of the examples (n, ...).
            targets: targets of the examples (n, ...).
        """
        here, data = self.point.data.clone(), self.point.data
        radius, slopes = self.directions.settings.radius, list[Tensor]()
        self.model.eval()
        for number in range(self.parameters.size):
            direction = self._direction(number)
            torch.add(here, direction, alpha=radius, out=data)
            above = self.loss(self.model(features), targets)
            torch.add(here, direction, alpha=-radius, out=data)
            below = self.loss(self.model(features), targets)
            slopes.append((above - below) / (2.0 * radius))
        data.copy_(here)
        return torch.stack(slopes, 1).to(data.dtype)

    def row_gradients(self, values: Tensor, padded: PaddedBatch) -> Mapping[int, ExampleUse]:
        """Return a dict from 0 to the weighted slopes (rows, P) of the loss along P directions.

        The slopes of a row of the padded batch are multiplied by the row's weight. Padding rows
        have slopes 0.

        Args:
            values: not used, because slopes are measured at the model's current parameters.
            padded: padded batch of one client, with the weights of its rows.
        """
        weights = padded.weights.unsqueeze(1)
        slopes = self.slopes(padded.features, padded.targets) * weights
        return {0: ExampleUse({0: slopes.masked_fill(weights == 0, 0.0)})}

    def add_sums(self, values: Tensor, padded: PaddedBatch, into: Tensor) -> None:
        """Add the weighted sum of unclipped slopes, Σ_i weight_i · slopes_i, to a tensor in place.

        Args:
            values: not used, because slopes are measured at the model's current parameters.
            padded: padded batch of one client, with the weights of its rows.
            into: tensor (1, P) to which the sum is added.
        """
        into += self.row_gradients(values, padded)[0].rows(0).sum(0)

    def _direction(self, number: int) -> Tensor:
        drawn = torch.tensor(self.directions.direction(*self._now, number))
        return drawn.to(self.point.data)


class SharedCoefficients(SharedModel):
    """Shared model of zeroth-order training, in which clients train coefficients, not parameters.

    There is a coefficient for each public direction of each step of a round. A coefficient starts
    from 0 and says how far the step moves the model along the direction.

    Args:
        slopes: object that computes the slopes of the model.
        steps: number K of steps in a round.

    Attributes:
        model: the model; `load_state_dict` rebuilds it from the coefficients of all rounds.
    """

    def __init__(self, slopes: Slopes, steps: int) -> None:
        number = slopes.parameters.size
        self._slopes, self._shape = slopes, (steps, number)
        self.held = coefficients_of(steps, number, like=slopes.point.data)
        super().__init__(slopes.model, parameters=self.held)
        self._places = {COEFFICIENTS: (slice(0, steps * number), self._shape)}
        self._fixed = {}
        self._start_point = slopes.point.data.clone()

    def load(self, arrays: ArrayRecord) -> str:
        """Load the global model for the clients and return its digest.

        Args:
            arrays: the array of coefficients of all rounds so far.

        Raises:
            ProtocolError: the arrays belong to another initial model.
        """
        before = self._loaded
        if before is not None and before[0] is arrays:
            return before[1]
        self._loaded = None
        state = {name: torch.from_numpy(np.array(a.numpy())) for name, a in arrays.items()}
        self.model.load_state_dict(state)
        self._start_point = self._slopes.point.data.clone()
        self.start_values = self.held.data.new_zeros(self.held.size)
        self._loaded = arrays, digest(arrays)
        return self._loaded[1]

    def restart(self) -> None:
        """Reset the model to the global model, and all coefficients to 0."""
        super().restart()
        self._slopes.point.data.copy_(self._start_point)

    def upload_of(
        self, trained: np.ndarray, request: ArrayRecord, *, private: bool
    ) -> dict[str, np.ndarray]:
        """Return the coefficients of a round by name, with no other arrays.

        Args:
            trained: coefficients of the round's K steps with P directions each, (K · P,).
            request: not used.
            private: not used.
        """
        return {COEFFICIENTS: np.array(trained).reshape(self._shape)}
