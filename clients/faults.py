"""Failures of clients: injected faults, and redaction of error messages under privacy.

A client that drops out during or after training has been charged, and the charge stays. An injected
fault depends only on the seed, the client and the round.

The text of an exception from a model, a loss or a data set may quote examples. It would go to the
server and into the files of the run. So if a client trains with privacy, only errors in
`PUBLIC_ERRORS` keep their text, because it contains no private value.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedsim.accountant.ledger.journal import JournalError
from fedsim.clients.client_settings import FaultSettings
from fedsim.core.errors import FedsimError
from fedsim.core.plugin_errors import PluginExitError, plugin_place, type_name
from fedsim.core.streams import Purpose, stream
from fedsim.protocol.errors import COUPLED_ROWS, ProtocolError


class ClientFailureError(FedsimError, RuntimeError):
    """Error of a client that cannot answer; the message gives the reason and nothing private.

    Attributes:
        code: error code of the Flower reply.
    """

    code: int = 0


class CoupledRowsError(ClientFailureError):
    """Error if an example can change bits of another example's gradient in the same batch.

    The error is raised before the client is charged.
    """

    code = COUPLED_ROWS


PUBLIC_ERRORS = (ClientFailureError, ProtocolError, JournalError, PluginExitError)
"""Error types whose messages contain no private value."""


def redact_error(error: Exception) -> Exception:
    """Return an error whose text is safe to show although the client trains with privacy.

    An error in `PUBLIC_ERRORS` is returned unchanged. Any other error is replaced by one that gives
    its type and the line of code.

    Guarantee: the new text depends only on this type and line, not on the original text.
    """
    if isinstance(error, PUBLIC_ERRORS):
        return error
    place = plugin_place(error.__traceback__) or _deepest_place(error)
    where = "" if place is None else f" at {place[0]}:{place[1]}"
    return ClientFailureError(
        f"{type_name(error)}{where} (the text is withheld, as it may quote examples; "
        "privacy=null shows it)"
    )


def _deepest_place(error: Exception) -> tuple[str, int | None] | None:
    frames = traceback.extract_tb(error.__traceback__)
    return (Path(frames[-1].filename).name, frames[-1].lineno) if frames else None


class InjectedFaultError(ClientFailureError):
    """Error of a client that fails because of an entry of `faults:` in the experiment file."""


@dataclass(frozen=True)
class Fault:
    """The injected fault of one client in one round; by default nothing fails.

    Methods are called in the order `before_charge`, `after_charge`, `alter_upload`. A client that
    fails in one of the first two does not train, because its result would not be uploaded.

    Attributes:
        uncharged: text of the error of a client that fails before it is charged; "" if none does.
        charged: text of the error of a client that fails after its charge; "" if none does.
        delay: simulated seconds by which the reply is late.
        corrupt: function that returns an invalid copy of the first array of the upload, which the
            server must not average; None if the upload is valid.
    """

    uncharged: str = ""
    charged: str = ""
    delay: float = 0.0
    corrupt: Callable[[np.ndarray], np.ndarray] | None = None

    def before_charge(self) -> None:
        """Raise InjectedFaultError if the client fails before it is charged."""
        if self.uncharged:
            raise InjectedFaultError(self.uncharged)

    def after_charge(self) -> None:
        """Raise InjectedFaultError if the client fails after its charge and before its upload."""
        if self.charged:
            raise InjectedFaultError(self.charged)

    def alter_upload(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the arrays that the client sends; by default, `arrays` unchanged."""
        if self.corrupt is None:
            return arrays
        first = next(iter(arrays))
        return {**arrays, first: self.corrupt(arrays[first])}


_NO_FAULT = Fault()


@dataclass(frozen=True)
class FaultPlan:
    """Injected faults of every client and round, drawn from a seed.

    Guarantee: the fault of a client in a round depends on no other client or round, and on no data.

    Attributes:
        seed: the experiment's seed.
        faults: the entries of `faults:` in the experiment file.
    """

    seed: int = 0
    faults: tuple[FaultSettings, ...] = ()

    def of(self, client: int, round_number: int) -> Fault:
        """Return the fault of a client in a round, from the first entry of `faults:` that applies.

        If no entry applies, the fault does nothing.

        Args:
            client: number of the client.
            round_number: the round ≥ 1.
        """
        if not self.faults:
            return _NO_FAULT
        generator = stream(self.seed, Purpose.FAULT, client=client, round_number=round_number)
        chances = generator.random(len(self.faults))
        for entry, chance in zip(self.faults, chances, strict=True):
            named = entry.clients is None or client in entry.clients
            due = entry.rounds is None or round_number in entry.rounds
            if named and due and chance < entry.probability:
                return _make_fault(entry)
        return _NO_FAULT


def _make_fault(entry: FaultSettings) -> Fault:
    match entry.kind:
        case "dropout_before":
            return Fault(uncharged="dropped out before training (injected)")
        case "dropout_during":
            return Fault(charged="dropped out during training (injected)")
        case "dropout_after":
            return Fault(charged="dropped out after training (injected)")
        case "straggler":
            return Fault(delay=entry.delay or 0.0)
        case "error":
            return Fault(charged="raised an error in training (injected)")
        case "nan":
            return Fault(corrupt=partial(_with_first_value, value=np.nan))
        case "inf":
            return Fault(corrupt=partial(_with_first_value, value=np.inf))
        case "wrong_shape":
            return Fault(corrupt=lambda array: array[..., np.newaxis])
        case "empty":
            return Fault(uncharged="has no examples (injected)")


def _with_first_value(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.astype(np.result_type(array.dtype, np.float32))
    changed.reshape(-1)[0] = value
    return changed
