"""The command `fedsim init`."""

import shlex
from pathlib import Path

import click

from fedsim.cli.options import json_option, print_json


@click.command("init", short_help="Write an experiment to start from into a new directory DIR.")
@click.argument("directory", metavar="DIR", type=click.Path())
@json_option
def init_command(directory: str, as_json: bool) -> None:
    """Write an experiment, a model and their tests into DIR, a new or empty directory.

    The files are commented and run as they stand, without network or data of your own.
    """
    from fedsim.starter import STARTER_FILES, write_starter

    written = write_starter(Path(directory))
    if as_json:
        print_json({"files": [str(path) for path in written]})
        return
    width = max(len(str(path)) for path in written)
    for path, description in zip(written, STARTER_FILES.values(), strict=True):
        click.echo(f"{path!s:<{width}}  {description}")
    click.echo("next:")
    click.echo(f"  cd {shlex.quote(directory)}")
    click.echo("  fedsim plan experiment.yaml")
    click.echo("  fedsim run experiment.yaml")
    click.echo("  python -m pytest test_model.py")
