"""The error that ends a federation."""

from fedsim.core.errors import FedsimError


class FederationError(FedsimError, RuntimeError):
    """The federation cannot continue; the message says why."""
