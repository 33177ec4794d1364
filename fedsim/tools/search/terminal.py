"""A search in the terminal: both figures with their observers."""

from rich.console import Console

from fedsim.report.terminal_text import print_sentence
from fedsim.tools.search.perform import SearchResult


def print_search(result: SearchResult, console: Console | None = None) -> None:
    """Print the selected candidate, both figures, and which folder may be handed on.

    Args:
        result: the search.
        console: where to print; default: stdout.
    """
    console = console or Console()
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
