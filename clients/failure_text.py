"""Text of a client's failure: what may leave a private client.

An exception of a model, a loss or a data set may quote examples in its text, and a failure's reason
travels to the server and into the files of the run. Where a client trains privately, only errors of
fedsim's own, whose texts name no private value, keep their text.
"""

import traceback
from pathlib import Path

from fedsim.accountant.ledger.journal import JournalError
from fedsim.core.errors import FedsimError
from fedsim.core.plugin_errors import PluginExitError, plugin_place, type_name
from fedsim.protocol.errors import COUPLED_ROWS, ProtocolError


class ClientFailureError(FedsimError, RuntimeError):
    """A client cannot answer; the message says why and holds nothing private.

    `code` is the code of Flower's error in the reply.
    """

    code: int = 0


class CoupledRowsError(ClientFailureError):
    """The examples of one tile are not kept apart, bit for bit; nothing was charged."""

    code = COUPLED_ROWS


PUBLIC_ERRORS = (ClientFailureError, ProtocolError, JournalError, PluginExitError)
"""Errors whose texts name no private value."""


def redact_error(error: Exception) -> Exception:
    """Return an error of fedsim as it is; of any other, its type and line of code alone.

    Guarantee: the text depends on the type and the line of a foreign exception, and on nothing else
    of it.
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
