"""The `fedsim compare` command. Nothing heavy is imported before it is called."""

import sys

import click

from fedsim.cli.options import json_option
from fedsim.cli.output import print_json
from fedsim.core.errors import ExitCode


@click.command("compare", short_help="Run the variants in FILE with every seed; compare them.")
@click.argument("file", type=click.Path())
@click.option(
    "--out",
    type=click.Path(),
    help="Output directory; an earlier one is continued. Default: runs/NAME, or runs/NAME-search.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of parallel runs. Default: one per processor.",
)
@click.option(
    "--select",
    is_flag=True,
    help="Perform the charged search of FILE: keep one model, destroy all other runs.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print only the result, no progress.")
@json_option
def compare_command(
    file: str, out: str | None, workers: int | None, select: bool, quiet: bool, as_json: bool
) -> None:
    """Run every variant in the comparison FILE with every seed and compare the results.

    Finished runs are reused and unfinished runs resumed: to continue after an interruption, run
    the same command again.

    --select performs the search that select.search describes: a secret number of runs, drawn and
    charged before the first one, of which the best model alone is kept. It prints two figures, one
    for the server and the clients, and one for an observer of nothing but that model.
    """
    if select:
        _search(file, out, workers, quiet=quiet, as_json=as_json)
        return
    from fedsim.comparison.compare import compare as run_comparison
    from fedsim.comparison.results import NothingFinishedError
    from fedsim.comparison.terminal import ComparisonProgress, print_comparison

    observer = None if quiet else ComparisonProgress()
    try:
        result = run_comparison(file, out=out, workers=workers, observer=observer)
    except NothingFinishedError as error:
        click.echo(str(error), err=True)
        sys.exit(ExitCode.FAILED)
    if as_json:
        content = {**result.to_json(), "path": str(result.path)}
        print_json(content)
    else:
        print_comparison(result)
    for run in result.failed:
        click.echo(f"{run.path}: {run.reason}", err=True)
    if result.interrupted:
        click.echo("interrupted; run the same command again to continue", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    if result.failed:
        sys.exit(ExitCode.FAILED)


def _search(file: str, out: str | None, workers: int | None, *, quiet: bool, as_json: bool) -> None:
    from fedsim.comparison.search.perform import search
    from fedsim.comparison.search.terminal import print_search

    if not quiet:
        click.echo("searching; the number of runs is secret, so no progress is shown", err=True)
    try:
        result = search(file, out=out, workers=workers)
    except KeyboardInterrupt:
        click.echo("interrupted; run the same command again to continue", err=True)
        raise
    if as_json:
        content = {**result.account, "path": str(result.path), "folder": str(result.selected)}
        print_json(content)
    else:
        print_search(result)
