"""The error of messages between server and clients."""

from fedsim.core.errors import FedsimError


class ProtocolError(FedsimError, ValueError):
    """A message that does not follow the protocol; it names the record and what is wrong."""
