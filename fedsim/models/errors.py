"""The error of everything in `fedsim.models`, importable without torch."""


class ModelError(ValueError):
    """Model, loss and data do not fit together; the message is one line with the fix."""
