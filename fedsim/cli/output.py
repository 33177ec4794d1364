"""Output of the commands: results on stdout, messages on stderr."""

import json
import sys
from contextlib import suppress
from typing import NoReturn

import click

MAX_LINE_CHARS = 2000
"""Most characters of a line of a message: more is a mistake that would hide what is wrong."""


def say(message: str) -> None:
    """Print a message to stderr, without the middle of lines that nobody would read."""
    half = MAX_LINE_CHARS // 2
    lines = (
        line if len(line) <= MAX_LINE_CHARS else f"{line[:half]}...{line[-half:]}"
        for line in message.split("\n")
    )
    with suppress(OSError, ValueError):  # nobody hears: the exit code tells
        click.echo("\n".join(lines), err=True)


def fail(message: str, code: int) -> NoReturn:
    """Print a message to stderr and exit.

    Args:
        message: what is wrong, and the fix.
        code: the exit code.
    """
    say(message)
    sys.exit(code)


def print_json(value: object) -> None:
    """Print a value as JSON to stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
