"""Output of the commands: results on stdout, messages on stderr."""

import json
import sys
from typing import NoReturn

import click


def fail(message: str, code: int) -> NoReturn:
    """Print a message to stderr and exit.

    Args:
        message: what is wrong, and the fix.
        code: the exit code.
    """
    click.echo(message, err=True)
    sys.exit(code)


def print_json(value: object) -> None:
    """Print a value as JSON to stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
