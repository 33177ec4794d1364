"""Models of zeroth-order training, rebuilt from the coefficients of public random directions."""

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.models.local_base import LocalBase, OtherBaseError, digest_of, whole_state
from fedsim.protocol.arrays import BASE_DIGEST, COEFFICIENTS
from fedsim.zeroth_order.directions import Directions
from fedsim.zeroth_order.settings import ZerothOrderSettings


class RebuiltModel(LocalBase):
    """The local base of a zeroth-order model: all its initial values, which are never sent.

    Server and clients send each other only the coefficients of all rounds. The trained values are
    the initial values plus the sum of coefficient times public direction. The sum is computed on
    the CPU, in the order of rounds, steps and directions.

    Args:
        model: the initial model.
        settings: settings of the public random directions.
        seed: the experiment's seed.
        steps: number of steps of a round.
    """

    def __init__(
        self, model: nn.Module, settings: ZerothOrderSettings, *, seed: int, steps: int
    ) -> None:
        super().__init__(model)
        self.trained = (COEFFICIENTS,)
        state = whole_state(model)
        self.hidden = frozenset(state)
        self.digest = digest_of({name: state[name] for name in sorted(state)})
        trained = [value for value in model.parameters() if value.requires_grad]
        self._start = torch.cat([value.detach().flatten() for value in trained]).numpy().copy()
        self._places = _places(model)
        self.directions = Directions(seed, self._start.size, settings)
        self.rounds = np.zeros((0, steps, settings.directions), self._start.dtype)
        self._values = self._start.copy()

    def to_wire(self, state: dict[str, Tensor]) -> None:
        """Replace a `state_dict`, in place, by the zeroth-order coefficients of all rounds.

        A digest of the initial values goes with them. The receiver compares it with the digest of
        its own initial values.
        """
        state.clear()
        state[COEFFICIENTS] = torch.from_numpy(self.rounds.copy())
        state[BASE_DIGEST] = self.digest.clone()

    def from_wire(self, state: dict[str, Tensor]) -> None:
        """Replace the coefficients in a received `state_dict` by the trained values, in place.

        Raises:
            OtherBaseError: the sender has another initial model, or another number of steps or
                directions.
        """
        super().from_wire(state)
        rounds = state.pop(COEFFICIENTS).cpu().numpy()
        if rounds.shape[1:] != self.rounds.shape[1:] or rounds.dtype != self.rounds.dtype:
            raise OtherBaseError(
                f"coefficients of rounds must be {self.rounds.dtype} of shape "
                f"{self.rounds.shape[1:]} (steps, directions), got {rounds.dtype} of shape "
                f"{rounds.shape[1:]}; run the same experiment on all parties"
            )
        self._rebuild(rounds)
        values = torch.from_numpy(self._values)
        for name, (place, shape) in self._places.items():
            state[name] = values[place].view(shape)

    def _rebuild(self, rounds: np.ndarray) -> None:
        """Update the trained values to those after `rounds`, adding only rounds that are new."""
        known = len(self.rounds)
        if not np.array_equal(self.rounds, rounds[:known]):
            self._values, known = self._start.copy(), 0
        for number in range(known, len(rounds)):
            self.directions.add_round(self._values, rounds[number], number + 1)
        self.rounds = rounds.copy()


def _places(model: nn.Module) -> dict[str, tuple[slice, torch.Size]]:
    """Return each value's slice of the flat trained values, and its shape; tied names share one."""
    places, end = dict[int, slice](), 0
    for value in model.parameters():
        if value.requires_grad:
            places[id(value)] = slice(end, end + value.numel())
            end += value.numel()
    named = model.named_parameters(remove_duplicate=False)
    return {name: (places[id(v)], v.shape) for name, v in named if id(v) in places}
