"""What the experiment format has but this version does not do yet.

Looked up only for what the settings refuse, so a line here is dead, not wrong, once the settings
accept it. Delete it then.
"""

from fedsim.experiment.wording import KeyPath

_KEYS: set[KeyPath] = {
    ("secure_aggregation",),
}


def unsupported_key(path: KeyPath) -> bool:
    """Return whether a key is part of the format but not of this version."""
    return path in _KEYS
