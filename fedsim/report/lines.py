"""Sentences on a terminal: broken into lines between words, never inside a number or a unit."""

import re
import textwrap

from rich.console import Console

# Kept together: `ε = 8`, `δ = 0.001`, `± 1.2`, `22 steps`, `95 %`, `round 3`, `client 7`.
_GLUED = re.compile(
    r"(?<=[εδμzqC±≤=]) (?=[=≤∞\d])|(?<=\d) (?=%|pp\b|s\b|steps?\b|rounds?\b|clients?\b|examples?\b)"
    r"|(?<=\bround) (?=\d)|(?<=\bclient) (?=\d)|(?<=\baccuracy) (?=\d)|(?<=\bloss) (?=\d)"
)
_GLUE = "\u00a0"


def lines_of(text: str, width: int, *, indent: str = "") -> str:
    """Return a text as lines of at most `width` characters, the later ones indented.

    A word that is longer, such as a path, stays whole. Spaces that were there stay ordinary ones.
    """
    lines = textwrap.wrap(
        _GLUED.sub(_GLUE, text),
        max(width, len(indent) + 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_GLUE, " ")


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a sentence: in lines of a terminal's width, or whole where no terminal is."""
    if console.is_terminal:
        text = lines_of(text, console.width, indent="  ")
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
