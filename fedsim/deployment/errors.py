"""What a person can get wrong when deploying."""


class DeploymentError(ValueError):
    """Something about a deployment does not fit; one line that says what, and how to mend it."""
