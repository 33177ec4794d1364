"""What a person can get wrong when deploying."""

from fedsim.core.errors import InputError


class DeploymentError(InputError):
    """Something about a deployment does not fit; one line that says what, and how to mend it."""
