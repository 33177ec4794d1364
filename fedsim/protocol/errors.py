"""The error of messages between server and clients."""

from fedsim.core.errors import FedsimError


class ProtocolError(FedsimError, ValueError):
    """A message that does not follow the protocol; it names the record and what is wrong."""


# Code of the error of a client that would reuse noise; the codes of Flower are below 100.
NOISE_REUSE = 1001
