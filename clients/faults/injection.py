"""Injected faults, for the study of federations whose clients fail.

A client that drops out during or after training was charged, and its spend stays charged. Whether a
fault strikes depends on the seed, the client and the round alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord

from fedsim.clients.failure_text import ClientFailureError
from fedsim.clients.faults.settings import FaultSettings
from fedsim.core.streams import Purpose, stream
from fedsim.protocol.arrays import to_arrays, to_numpy


class InjectedFaultError(ClientFailureError):
    """A fault of the experiment's `faults:` section."""


class Fault:
    """The fault of one client in one round; this base class does nothing.

    Methods are called in this order: `before_charge`, `after_charge`, `alter_upload`. A client
    that fails in one of the first two does not train: nobody would see what it trained.

    Attributes:
        delay: simulated seconds by which the reply is late.
    """

    delay: float = 0.0

    def before_charge(self) -> None:
        """Fail before the client's account is touched."""

    def after_charge(self) -> None:
        """Fail after the charge, before the upload."""

    def alter_upload(self, upload: ArrayRecord) -> ArrayRecord:
        """Return the upload to send."""
        return upload


class DropoutBefore(Fault):
    """The client drops out before it is charged."""

    def before_charge(self) -> None:
        """Raise InjectedFaultError."""
        raise InjectedFaultError("dropped out before training (injected)")


class EmptyPartition(Fault):
    """The client finds no data, and is not charged."""

    def before_charge(self) -> None:
        """Raise InjectedFaultError."""
        raise InjectedFaultError("has no examples (injected)")


@dataclass(frozen=True)
class TrainingFailure(Fault):
    """The client is charged and fails in training."""

    reason: str

    def after_charge(self) -> None:
        """Raise InjectedFaultError."""
        raise InjectedFaultError(self.reason)


class DropoutAfter(Fault):
    """The client is charged, but its upload is lost."""

    def after_charge(self) -> None:
        """Raise InjectedFaultError."""
        raise InjectedFaultError("dropped out after training (injected)")


@dataclass(frozen=True)
class Straggler(Fault):
    """The client replies `delay` simulated seconds late."""

    delay: float


@dataclass(frozen=True)
class CorruptUpload(Fault):
    """The client uploads values that must not be averaged."""

    corrupt: Callable[[np.ndarray], np.ndarray]

    def alter_upload(self, upload: ArrayRecord) -> ArrayRecord:
        """Return the upload with its first array corrupted."""
        arrays = to_numpy(upload)
        first = next(iter(arrays))
        return to_arrays({**arrays, first: self.corrupt(arrays[first])})


@dataclass(frozen=True)
class FaultPlan:
    """The faults of every client and round.

    Guarantee: the fault of a client in a round depends on no other client or round, nor on data.
    """

    seed: int = 0
    faults: tuple[FaultSettings, ...] = ()

    def of(self, client: int, round_number: int) -> Fault:
        """Return the fault of a client in a round: that of the first entry that strikes."""
        for entry, strikes in zip(
            self.faults, self._draw_strikes(client, round_number), strict=True
        ):
            named = entry.clients is None or client in entry.clients
            due = entry.rounds is None or round_number in entry.rounds
            if named and due and strikes:
                return _make_fault(entry)
        return Fault()

    def _draw_strikes(self, client: int, round_number: int) -> Sequence[bool]:
        if not self.faults:
            return ()
        generator = stream(self.seed, Purpose.FAULT, client=client, round_number=round_number)
        chances = generator.random(len(self.faults))
        return [
            chance < entry.probability for chance, entry in zip(chances, self.faults, strict=True)
        ]


def _make_fault(entry: FaultSettings) -> Fault:
    match entry.kind:
        case "dropout_before":
            return DropoutBefore()
        case "dropout_during":
            return TrainingFailure("dropped out during training (injected)")
        case "dropout_after":
            return DropoutAfter()
        case "straggler":
            return Straggler(entry.delay or 0.0)
        case "error":
            return TrainingFailure("raised an error in training (injected)")
        case "nan":
            return CorruptUpload(lambda array: _with_first_value(array, np.nan))
        case "inf":
            return CorruptUpload(lambda array: _with_first_value(array, np.inf))
        case "wrong_shape":
            return CorruptUpload(lambda array: array[..., np.newaxis])
        case "empty":
            return EmptyPartition()


def _with_first_value(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.astype(np.result_type(array.dtype, np.float32))
    changed.reshape(-1)[0] = value
    return changed


NO_FAULTS = FaultPlan()
