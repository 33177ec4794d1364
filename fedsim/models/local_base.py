"""The local base of a model: its frozen values, which stay on each party and are never sent.

If only some parameters of a model are trained, each party (server or client) builds the frozen
values itself, from the experiment and its files. `state_dict` and `load_state_dict` of such a model
use only the trained values and a digest of the local base. So do messages, sums of updates and
checkpoints. A party whose local base has another digest is refused before it trains. Models of
zeroth-order training are rebuilt by each party, from the coefficients of public random directions.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.protocol.arrays import BASE_DIGEST, COEFFICIENTS
from fedsim.protocol.errors import ProtocolError
from fedsim.zeroth_order.directions import Directions
from fedsim.zeroth_order.settings import ZerothOrderSettings


class OtherBaseError(ProtocolError):
    """Raised if a sender's frozen values differ from those of the receiving party."""


class LocalBase:
    """The local base of a model: its frozen values, which stay on each party and are never sent.

    Args:
        model: the model with its final frozen values; `attach` connects it with this object.

    Attributes:
        hidden: names of the values that are not sent.
        digest: SHA-256 of the hidden values, uint8 (32,).
        is_whole: whether `state_dict` returns all values of the model, as inside a `whole` block.
    """

    def __init__(self, model: nn.Module) -> None:
        state = whole_state(model)
        named = model.named_parameters(remove_duplicate=False)
        self.hidden = frozenset(state) - {name for name, value in named if value.requires_grad}
        self.digest = digest_of({name: state[name] for name in sorted(self.hidden)})
        self.is_whole = False

    def to_wire(self, state: dict[str, Tensor]) -> None:
        """Replace the frozen values in a `state_dict` by the digest of these values, in place."""
        for name in self.hidden:
            state.pop(name, None)
        state[BASE_DIGEST] = self.digest.clone()

    def from_wire(self, state: dict[str, Tensor]) -> None:
        """Check the digest of frozen values in a received `state_dict`; remove the digest in place.

        Raises:
            OtherBaseError: the sender has other frozen values.
        """
        digest = state.pop(BASE_DIGEST, None)
        if digest is not None and not torch.equal(digest.cpu(), self.digest):
            raise OtherBaseError(
                "the frozen values of this party's model differ from the sender's: give all "
                "parties the same file in model.init, the same seed and the same plug-ins"
            )

    def attach(self, model: nn.Module) -> None:
        """Make `state_dict` and `load_state_dict` of a model use only the values that are sent."""
        is_first = local_base(model) is None
        vars(model)[_ATTRIBUTE] = self
        if not is_first:
            return
        model.register_state_dict_post_hook(_after_state)
        model.register_load_state_dict_pre_hook(_before_load)
        model.register_load_state_dict_post_hook(_after_load)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make `state_dict` return all values of the model while the `with` block runs."""
        before, self.is_whole = self.is_whole, True
        try:
            yield
        finally:
            self.is_whole = before


def local_base(model: nn.Module) -> LocalBase | None:
    """Return the local base of a model (its values that are not sent); None if all are sent."""
    base = vars(model).get(_ATTRIBUTE)
    return base if isinstance(base, LocalBase) else None


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all values of a model by name, including those that are not sent to other parties."""
    base = local_base(model)
    if base is None:
        return model.state_dict()
    with base.whole():
        return model.state_dict()


def digest_of(values: Mapping[str, Tensor]) -> Tensor:
    """Return the SHA-256 of the names, types, shapes and bytes of values, uint8 (32,)."""
    state = hashlib.sha256()
    for name, value in values.items():
        array = np.ascontiguousarray(value.detach().cpu().numpy())
        state.update(f"{len(name)}:{name}{array.dtype.str}{array.shape}".encode())
        state.update(array.data.cast("B") if array.size else b"")
    return torch.frombuffer(bytearray(state.digest()), dtype=torch.uint8)


def _after_state(model: nn.Module, state: dict[str, Tensor], prefix: str, local: Any) -> None:
    base = local_base(model)
    if base is not None and not base.is_whole and not prefix:
        base.to_wire(state)


def _before_load(model: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    base = local_base(model)
    if base is not None and not prefix:
        base.from_wire(state)


def _after_load(model: nn.Module, keys: Any) -> None:
    base = local_base(model)
    if base is not None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in base.hidden]


_ATTRIBUTE = "fedsim_local_base"


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
