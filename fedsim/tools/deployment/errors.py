"""Errors of a deployment."""

from fedsim.core.errors import InputError


class DeploymentError(InputError):
    """A deployment cannot start or continue; the message is one line with the fix."""
