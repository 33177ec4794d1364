"""Errors in messages between server and clients, and the error that ends a federation."""

from fedsim.core.errors import FedsimError


class ProtocolError(FedsimError, ValueError):
    """Raised for a message that breaks the protocol; the error names the record and the fault."""


# Codes of errors that replace an answer; Flower's codes are below 100.
NOISE_REUSE = 1001  # the client would reuse noise
LEDGER_UNWRITABLE = 1002  # no charge can be written to the ledger of the run
NODE_RESTARTED = 1003  # the node was restarted during the request; reported by fedsim's grid
COUPLED_ROWS = 1004  # on this machine, an example of a batch affects another's gradient
# These end the run: it is not the run that began, or no client can be charged or trained.
ENDS_RUN = frozenset({NOISE_REUSE, LEDGER_UNWRITABLE, COUPLED_ROWS})


class FederationError(FedsimError, RuntimeError):
    """Raised if the federation cannot continue; the message says why."""
