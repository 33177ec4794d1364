"""The command `fedsim init`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedsim.cli.options import json_option, print_json

if TYPE_CHECKING:
    from fedsim.starter.tables import TableExperiment


@click.command("init", short_help="Write an experiment to start from into a new directory DIR.")
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option(
    "--data",
    metavar="FILE",
    type=click.Path(),
    help="A table, .csv or .parquet: its experiment is drafted from its rows.",
)
@click.option("--target", metavar="COLUMN", help="Column to predict; else found by its name.")
@click.option(
    "--clients", metavar="COLUMN", help="Column with the client of each row; else found by name."
)
@json_option
def init_command(
    directory: str, data: str | None, target: str | None, clients: str | None, as_json: bool
) -> None:
    """Write an experiment, a model and their tests into DIR, a new or empty directory.

    The files are commented and run as they stand, without network or data of your own. With --data
    it is an experiment on a table of your own, with a line for each of its columns.
    """
    if data is not None:
        _draft(Path(directory), Path(data), target, clients, as_json)
        return
    if target is not None or clients is not None:
        raise click.UsageError("--target and --clients name columns of a table; add --data FILE")
    from fedsim.starter import STARTER_FILES, write_starter

    written = write_starter(Path(directory))
    if as_json:
        print_json({"files": [str(path) for path in written]})
        return
    width = max(len(str(path)) for path in written)
    for path, description in zip(written, STARTER_FILES.values(), strict=True):
        click.echo(f"{path!s:<{width}}  {description}")
    _next(directory, "plan experiment.yaml", "run experiment.yaml")
    click.echo("  python -m pytest test_model.py")


def _draft(
    directory: Path, data: Path, target: str | None, clients: str | None, as_json: bool
) -> None:
    from fedsim.starter.tables import write_table_experiment

    draft = write_table_experiment(directory, data, target=target, clients=clients)
    if as_json:
        print_json(_as_json(draft))
        return
    click.echo(f"{draft.path}  drafted from {draft.rows:,} rows of {data}")
    click.echo(f"target: {draft.target} ({draft.target_reason})")
    click.echo(f"clients: {draft.clients or 'iid'} ({draft.clients_reason})")
    names = [column.name for column in draft.columns]
    width = max(map(len, names))
    for column in draft.columns:
        click.echo(f"  {column.name:<{width}}  {column.value or 'as it is':<38}  {column.reason}")
    click.echo(
        "These constants were read from the rows, which no ε covers: the file has a question for "
        "each,\nto answer from public knowledge before an ε is published."
    )
    _next(str(directory), "validate experiment.yaml --data", "run experiment.yaml")


def _as_json(draft: "TableExperiment") -> dict[str, object]:
    return {
        "files": [str(draft.path)],
        "rows": draft.rows,
        "target": draft.target,
        "clients": draft.clients,
        "columns": {
            column.name: {
                "settings": column.settings
                if column.settings is None or isinstance(column.settings, str)
                else column.settings.model_dump(exclude_defaults=True),
                "reason": column.reason,
                "check": column.check,
            }
            for column in draft.columns
        },
    }


def _next(directory: str, *commands: str) -> None:
    click.echo("next:")
    click.echo(f"  cd {shlex.quote(directory)}")
    for command in commands:
        click.echo(f"  fedsim {command}")
