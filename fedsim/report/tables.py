"""Tables in the terminal: narrow, and never with a truncated number."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_MAX_WIDTH_CHARACTERS = 1000
_MAX_NAME_CHARS = 30
MAX_TABLE_CLIENTS = 25


def figure_table(title: str, numbers: list[str], *, texts: Sequence[str] = ()) -> Table:
    """Return an empty table, narrow enough that ten columns of figures fit into 80 characters."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table without truncated numbers: with less padding, or wider than the terminal."""
    if _width(console, table) > console.width:
        table.padding = (0, 0, 0, 0)
    console.print(table, width=max(_width(console, table), console.width), crop=False)


def _width(console: Console, table: Table) -> int:
    return Measurement.get(
        console, console.options.update(width=_MAX_WIDTH_CHARACTERS), table
    ).maximum


def client_text(client: int, name: str | None) -> str:
    """Return a client's number, with its name where it has one."""
    if name is None:
        return str(client)
    return f"{client} {name if len(name) <= _MAX_NAME_CHARS else name[: _MAX_NAME_CHARS - 1] + '…'}"


def or_dash(value: float | None) -> str:
    """Return a number, or a dash for none."""
    return "–" if value is None else f"{value:g}"
