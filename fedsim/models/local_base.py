"""The local base of a model: its frozen values, which stay on each party and are never sent.

If only some parameters of a model are trained, each party (server or client) builds the frozen
values itself, from the experiment and its files. `state_dict` and `load_state_dict` of such a model
use only the trained values and a digest of the local base. So do messages, sums of updates and
checkpoints. A party whose local base has another digest is refused before it trains.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.protocol.arrays import BASE_DIGEST
from fedsim.protocol.errors import ProtocolError


class OtherBaseError(ProtocolError):
    """Raised if a sender's frozen values differ from those of the receiving party."""


class LocalBase:
    """The local base of a model: its frozen values, which stay on each party and are never sent.

    Args:
        model: the model with its final frozen values; `attach` connects it with this object.

    Attributes:
        trained: names of the values that are trained and sent.
        hidden: names of the values that are not sent.
        digest: SHA-256 of the hidden values, uint8 (32,).
        is_whole: whether `state_dict` returns all values of the model, as inside a `whole` block.
    """

    def __init__(self, model: nn.Module) -> None:
        self.trained = trained_names(model)
        state = whole_state(model)
        self.hidden = frozenset(state) - frozenset(self.trained)
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


def trained_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the values of a model that are trained, and so sent between parties."""
    base = local_base(model)
    if base is not None:
        return base.trained
    named = model.named_parameters(remove_duplicate=False)
    return tuple(name for name, value in named if value.requires_grad)


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
