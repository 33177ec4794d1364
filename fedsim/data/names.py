"""Words about the names in a file: what is there, and what was probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


def no_such(path: Path, kind: str, name: str, known: Iterable[str]) -> str:
    """Return that a file has no array or column of a name, with the nearest that it has."""
    names = list(known)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {quoted(names[:10])}"
    return f"{path}: no {kind} named {name!r}; {hint}"


def quoted(names: Iterable[str]) -> str:
    """Return names in quotes, sorted."""
    return ", ".join(repr(name) for name in sorted(names))
