"""Arguments and options that commands share, and functions that print results and messages."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NoReturn

import click

from fedsim.core.commands import quick_imports

MAX_LINE_CHARS = 2000
"""Largest number of characters in a line of a message: a longer line would hide the error."""

_USUAL_BOUNDS = "basic,strong,moments,rdp,pld"


def bounds_option(
    *, is_always: bool, words: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the option `--bounds NAME,NAME` to a command.

    Without the option, the command gets the default names if `is_always`, else None.
    """
    return click.option(
        "--bounds",
        metavar="NAME,NAME",
        default=_USUAL_BOUNDS if is_always else None,
        is_flag=False,
        flag_value=_USUAL_BOUNDS,
        callback=lambda context, parameter, text: None if text is None else tuple(text.split(",")),
        help=f"{words}, of basic, strong, kov, optimal, moments, rdp, pld. Without names: "
        f"{_USUAL_BOUNDS}.",
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def overrides_argument(command: Callable[..., None]) -> Callable[..., None]:
    """Add to a command the arguments `KEY=VALUE`, and `--seed N` as another form of `seed=N`."""

    @click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
    @click.option(
        "--seed", type=click.IntRange(min=0), help="Seed of all randomness, in place of the file's."
    )
    @wraps(command)
    def with_seed(*args: Any, overrides: tuple[str, ...], seed: int | None, **named: Any) -> None:
        seed_override = () if seed is None else (f"seed={seed}",)
        command(*args, overrides=(*overrides, *seed_override), **named)

    return with_seed


@contextmanager
def command_imports(*, quiet: bool = False) -> Iterator[None]:
    """Show "starting ..." on a terminal while the `with` block imports a command's modules."""
    shown = not quiet and sys.stderr.isatty()
    if shown:
        click.echo("starting ...", err=True, nl=False)
    try:
        with quick_imports():
            yield
    finally:
        if shown:
            click.echo("\r\x1b[K", err=True, nl=False)  # clears the line


class _StderrHandler(logging.Handler):
    """Writes log records to the current `sys.stderr`, which a progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def _show_logs(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """Show the log messages of fedsim until the command ends."""
    if not wanted:
        return
    logger, handler = logging.getLogger("fedsim"), _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def end() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before)

    context.call_on_close(end)


verbose_option = click.option(
    "--verbose",
    "-v",
    is_flag=True,
    expose_value=False,
    callback=_show_logs,
    help="Show log messages on stderr, with the time of every phase.",
)


def say(message: str) -> None:
    """Print a message to stderr; the middle of a very long line is left out."""
    half = MAX_LINE_CHARS // 2
    lines = (
        line if len(line) <= MAX_LINE_CHARS else f"{line[:half]}...{line[-half:]}"
        for line in message.split("\n")
    )
    with suppress(OSError, ValueError):  # nobody hears: the exit code tells
        click.echo("\n".join(lines), err=True)


def refuse_options(options: Mapping[str, Any], conflict: str) -> None:
    """Refuse options, of which one was given, that cannot be used with another argument."""
    for name, value in options.items():
        if value:
            raise click.UsageError(f"--{name.replace('_', '-')} does not go with {conflict}")


def fail(message: str, code: int) -> NoReturn:
    """Print a message to stderr and exit with a code."""
    say(message)
    sys.exit(code)


def print_json(value: object) -> None:
    """Print a value as JSON to stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
