"""The error of personal models."""

from fedsim.core.errors import InputError


class PersonalizationError(InputError):
    """A personal model that the settings cannot make of a model; one line with the fix."""
