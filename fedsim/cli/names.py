"""The commands `fedsim list` and `fedsim schema`."""

import sys

import click

from fedsim.cli.options import fail, json_option, print_json
from fedsim.core.errors import ExitCode

_PIPED_WIDTH = 1000  # one line for each name, for grep


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from fedsim.experiment import json_schema

    print_json(json_schema())


@click.command("list", short_help="List the built-in names of experiment files.")
@click.argument("kinds", nargs=-1, metavar="[KIND]...")
@json_option
def list_command(kinds: tuple[str, ...], as_json: bool) -> None:
    """List the built-in names of experiment files by kind, with a line on each.

    A KIND, such as datasets, metrics or samplings, lists the names of that kind alone.
    """
    from fedsim.catalog import KEYS, catalog
    from fedsim.experiment.errors import any_of, did_you_mean

    entries = catalog()
    for kind in kinds:
        if kind not in entries:
            hint = did_you_mean(kind, entries) or f"; there are {any_of(list(entries))}"
            fail(f"there is no kind {kind!r}{hint}", ExitCode.WRONG_INPUT)
    chosen = {kind: names for kind, names in entries.items() if not kinds or kind in kinds}
    if as_json:
        print_json(chosen)
        return
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    formatter = click.HelpFormatter(width=width)
    for kind, names in chosen.items():
        with formatter.section(f"{kind} ({KEYS[kind]})"):
            formatter.write_dl(list(names.items()), col_max=40)
    click.echo(formatter.getvalue().lstrip("\n"), nl=False)
