"""Hints on misspelled names, for messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that an unknown name resembles most; None if no name is close.

    Args:
        name: the unknown name. Time grows with its length and with the number of known names: cut
            what a file gives.
        known: the known names.
    """
    close = get_close_matches(name, list(known), n=1)
    return close[0] if close else None


def closest_hint(name: str, known: Iterable[str], otherwise: str, *, quotes: bool = True) -> str:
    """Return `did you mean 'x'?` for the closest known name, or another hint if none is close.

    Args:
        name: the unknown name.
        known: the known names.
        otherwise: the hint if no name is close.
        quotes: whether the name is in quotes.
    """
    close = closest_name(name, known)
    return otherwise if close is None else f"did you mean {repr(close) if quotes else close}?"
