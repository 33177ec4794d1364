"""Slopes of each example's loss along public directions, by forward passes alone.

A slope is a function of one example, so clipping its vector of P slopes, adding noise once and
dividing by the expected lot is a step of DP-SGD on a model of P values. Directions are drawn
without data. The update along them is post-processing of the noisy slopes.

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
from fedsim.clients.gradients.per_example import PerExampleGradients, PerExampleLoss, Tile
from fedsim.clients.training.shared_model import SharedModel
from fedsim.protocol.arrays import COEFFICIENTS, digest, is_live, live_record, to_arrays
from fedsim.zeroth_order.directions import Directions


class _Coefficients(nn.Module):
    """Coefficients as the parameter of a model, so that plans and clipping take them as one."""

    def __init__(self, *shape: int, like: Tensor) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(like.new_zeros(shape))


def coefficients_of(*shape: int, like: Tensor) -> FlatParameters:
    """Return coefficients of 0 of a shape, of the type and on the device of a tensor."""
    return FlatParameters(_Coefficients(*shape, like=like))


class Slopes(PerExampleGradients):
    """Per-example slopes at the model's trained values, which begin at the global model's.

    Dropout is off: both losses of a slope are those of one function.

    Args:
        model: its trained parameters become views of one flat tensor, `point`.
        loss: one value per example.
        directions: of the experiment.

    Attributes:
        parameters: P coefficients, of the directions of one step.
        point: the trained values (d,).
    """

    def __init__(self, model: nn.Module, loss: PerExampleLoss, directions: Directions) -> None:
        self.point = FlatParameters(model)
        self.directions = directions
        number = directions.settings.directions
        super().__init__(model, loss, parameters=coefficients_of(number, like=self.point.data))
        self._now = (0, 0)
        self._before: tuple[slice, Tensor] | None = None

    def begin_step(self, round_number: int, step: int, values: Tensor) -> slice:
        """Move the point by the step before, and return the place of this step's release.

        Args:
            round_number: the round.
            step: of the round, from 0.
            values: coefficients of all steps of the round (1, K · P).
        """
        size = self.parameters.size
        if step and self._before is not None:
            place, earlier = self._before
            moved = (values[0, place] - earlier).tolist()
            for number, coefficient in enumerate(moved):
                if coefficient:
                    self.point.data.add_(self._direction(number), alpha=coefficient)
        start = step * size % values.shape[1]  # a probe takes more steps than a round has
        place = slice(start, start + size)
        self._now, self._before = (round_number, step), (place, values[0, place].clone())
        return place

    @torch.no_grad()
    def slopes(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the slopes (n, P) of n examples; the point is as before.

        Args:
            features: (n, ...).
            targets: (n, ...).
        """
        here, data = self.point.data.clone(), self.point.data
        radius, found = self.directions.settings.radius, list[Tensor]()
        self.model.eval()
        for number in range(self.parameters.size):
            direction = self._direction(number)
            torch.add(here, direction, alpha=radius, out=data)
            above = self.loss(self.model(features), targets)
            torch.add(here, direction, alpha=-radius, out=data)
            below = self.loss(self.model(features), targets)
            found.append((above - below) / (2.0 * radius))
        data.copy_(here)
        return torch.stack(found, 1).to(data.dtype)

    def row_gradients(self, values: Tensor, tile: Tile) -> Mapping[int, ExampleUse]:
        """Return the slopes of a tile's rows; rows that are no examples have 0.

        Args:
            values: not used: slopes are those at the point.
            tile: rows of one client.
        """
        weights = tile.weights.unsqueeze(1)
        slopes = self.slopes(tile.features, tile.targets) * weights
        return {0: ExampleUse({0: slopes.masked_fill(weights == 0, 0.0)})}

    def add_sums(self, values: Tensor, tile: Tile, into: Tensor) -> None:
        """Add Σ_i weight_i · slopes_i to `into` (1, P), not clipped.

        Args:
            values: not used.
            tile: rows of one client, and the weights of their losses.
            into: (1, P).
        """
        into += self.row_gradients(values, tile)[0].rows(0).sum(0)

    def _direction(self, number: int) -> Tensor:
        drawn = torch.tensor(self.directions.direction(*self._now, number))
        return drawn.to(self.point.data)


class SharedCoefficients(SharedModel):
    """Coefficients of the steps of a round, which start from 0, and the model that they move.

    Args:
        slopes: of the model.
        steps: K, steps of a round.

    Attributes:
        model: the model, whose `load_state_dict` rebuilds it from all rounds' coefficients.
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
        """Make `arrays` the global model of the clients, and return its digest.

        Raises:
            ProtocolError: they belong to another initial model.
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
        """Reset the model to the global model, and the coefficients to 0."""
        super().restart()
        self._slopes.point.data.copy_(self._start_point)

    def upload_of(self, trained: np.ndarray, request: ArrayRecord, *, private: bool) -> ArrayRecord:
        """Return the coefficients of a round as a record, and nothing else.

        Args:
            trained: coefficients (K · P,).
            request: the global model; its kind is the result's.
            private: not used.
        """
        values = {COEFFICIENTS: np.array(trained).reshape(self._shape)}
        return live_record(values) if is_live(request) else to_arrays(values)
