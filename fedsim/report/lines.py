"""Sentences in a terminal: lines break between words, never between a number and its unit."""

import re
import textwrap

from rich.console import Console

# Kept together: `ε = 8`, `δ = 0.001`, `± 1.2`, `22 steps`, `95 %`, `round 3`, `client 7`.
_GLUED = re.compile(
    r"(?<=[εδμzqC±≤=]) (?=[=≤∞\d])|(?<=\d) (?=%|pp\b|s\b|steps?\b|rounds?\b|clients?\b|examples?\b)"
    r"|(?<=\bround) (?=\d)|(?<=\bclient) (?=\d)|(?<=\baccuracy) (?=\d)|(?<=\bloss) (?=\d)"
)
_GLUE = "\u00a0"


def wrap_text(text: str, width: int, *, indent: str = "") -> str:
    """Return a text wrapped into lines of at most `width` characters.

    A longer word, such as a path, stays whole.

    Args:
        text: the text on one line.
        width: maximal length of a line, in characters.
        indent: prefix of every line but the first.
    """
    lines = textwrap.wrap(
        _GLUED.sub(_GLUE, text),
        max(width, len(indent) + 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_GLUE, " ")


def print_sentence(console: Console, text: str, style: str | None = None) -> None:
    """Print a sentence: wrapped to the width of a terminal, or on one line elsewhere."""
    if console.is_terminal:
        text = wrap_text(text, console.width, indent="  ")
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
