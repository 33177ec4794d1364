"""The error of everything in `fedsim.models`, importable without torch."""

from fedsim.core.errors import InputError


class ModelError(InputError):
    """Model, loss and data do not fit together; the message is one line with the fix."""


class MetricError(InputError):
    """A metric does not fit the task, or failed; the message is one line with the fix."""
