"""The commands `list` and `schema`."""

import click

from fedsim.cli.options import json_option
from fedsim.cli.output import print_json


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from fedsim.experiment import json_schema

    print_json(json_schema())


@click.command("list", short_help="List the built-in names of experiment files.")
@json_option
def list_command(as_json: bool) -> None:
    """List the built-in datasets, partitions, models, losses and strategies."""
    from fedsim.catalog import catalog

    entries = catalog()
    if as_json:
        print_json(entries)
        return
    width = max(len(name) for names in entries.values() for name in names)
    for kind, names in entries.items():
        click.echo(click.style(kind, bold=True))
        for name, description in names.items():
            click.echo(f"  {name:<{width}}  {description}")
