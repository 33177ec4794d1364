"""Messages about the names of arrays and columns in a file."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_MAX_NAMES = 1000  # compared with an unknown one
_MAX_CHARS = 100


def unknown_name(path: Path, kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the closest known name or all of them.

    Args:
        path: the file.
        kind: the noun for the named thing, such as column.
        name: the unknown name.
        known: the names in the file.
    """
    names = list(known)
    close = closest_name(name, names)
    hint = f"did you mean {close!r}?" if close is not None else f"known: {quoted(names[:10])}"
    return f"{path}: no {kind} named {name[:_MAX_CHARS]!r}; {hint}"


def quoted(names: Iterable[str]) -> str:
    """Return sorted names in quotes, with commas between; long ones are cut."""
    return ", ".join(repr(name[:_MAX_CHARS]) for name in sorted(names))


def closest_name(name: str, known: list[str]) -> str | None:
    """Return the known name that an unknown one resembles most, or None.

    Args:
        name: the unknown name.
        known: the known ones.
    """
    close = get_close_matches(name[:_MAX_CHARS], known[:_MAX_NAMES], n=1)
    return close[0] if close else None
