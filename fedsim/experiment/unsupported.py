"""What the experiment format has but this version does not do yet.

Looked up only for what the settings refuse, so a line here is dead, not wrong, once the settings
accept it. Delete it then.
"""

from fedsim.experiment.wording import KeyPath

_CHOICES: dict[KeyPath, set[str]] = {
    ("privacy", "clipping"): {"adaptive"},
    ("privacy", "accountant"): {"moments"},
}


def unsupported_choice(path: KeyPath, value: object) -> bool:
    """Return whether a choice is part of the format but not of this version."""
    return isinstance(value, str) and value in _CHOICES.get(path, ())
