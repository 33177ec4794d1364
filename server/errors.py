"""What ends a federation."""


class FederationError(RuntimeError):
    """The federation cannot go on; the message says why."""
