"""What ends a federation."""

from fedsim.core.errors import FedsimError


class FederationError(FedsimError, RuntimeError):
    """The federation cannot go on; the message says why."""
