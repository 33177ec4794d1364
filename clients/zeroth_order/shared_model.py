"""The model that clients share where they train coefficients of public directions."""

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedsim.clients.training.shared_model import SharedModel
from fedsim.clients.zeroth_order.slopes import Slopes, coefficients_of
from fedsim.protocol.arrays import COEFFICIENTS, digest, is_live, live_record, to_arrays


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
