"""Command `fedsim compare FILE --select`: perform a search and print both guarantees."""

import click
from rich.console import Console

from fedsim.cli.options import print_json
from fedsim.report.terminal import print_sentence
from fedsim.tools.search.perform import search


def perform(file: str, *, out: str | None, workers: int | None, quiet: bool, as_json: bool) -> None:
    """Perform the search of a comparison file; print the result and what may be published."""
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
        return
    console = Console()
    chosen = "no run was drawn, so nothing is selected"
    if result.variant is not None:
        chosen = f"selected: {result.variant}"
    print_sentence(console, f"{result.account['name']}: {chosen}", style="bold")
    for sentence in result.statement:
        print_sentence(console, sentence)
    print_sentence(console, f"hand on nothing but {result.selected}")
    print_sentence(
        console,
        f"keep {result.path / 'account'}, and what was printed here, with the server: both tell "
        "the number of runs",
    )
