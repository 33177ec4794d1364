"""The errors of messages between server and clients, and the one that ends a federation."""

from fedsim.core.errors import FedsimError


class ProtocolError(FedsimError, ValueError):
    """A message that does not follow the protocol; it names the record and what is wrong."""


# Codes of errors in place of an answer; those of Flower are below 100.
NOISE_REUSE = 1001  # the client would reuse noise
LEDGER_UNWRITABLE = 1002  # no charge can be written to the ledger of the run
NODE_RESTARTED = 1003  # its node was restarted during the request; said by the server's own grid
COUPLED_ROWS = 1004  # examples of one tile are not kept apart on this machine
# After these the run ends: it is not the one that began, or no client can be charged or trained.
ENDS_RUN = frozenset({NOISE_REUSE, LEDGER_UNWRITABLE, COUPLED_ROWS})


class FederationError(FedsimError, RuntimeError):
    """The federation cannot continue; the message says why."""
