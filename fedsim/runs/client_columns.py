"""Columns of the tables of clients: `clients.csv`, in Python, in the terminal and in the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedsim.core.formatting import aligned_epsilon, delta_text, epsilon_text, or_dash
from fedsim.core.text_formats import csv_text

ClientRows = Sequence[Mapping[str, Any]]  # one row of `privacy.json` for each client
_Rule = Callable[[str, ClientRows], bool]


def _always(name: str, rows: ClientRows) -> bool:
    return True


def _recorded(name: str, rows: ClientRows) -> bool:
    return any(name in row for row in rows)


def _known(name: str, rows: ClientRows) -> bool:
    return any(row.get(name) is not None for row in rows)


def _differs(name: str, rows: ClientRows) -> bool:
    return len({row.get(name) for row in rows}) > 1


@dataclass(frozen=True)
class Place:
    """How a table in the terminal or the report shows a column."""

    order: float  # from left to right
    heading: str
    text: Callable[[Any], str | int] = str
    where: _Rule = _always  # whether to show it


@dataclass(frozen=True)
class ClientColumn:
    """A column of the tables of clients; its name is a key in a client's row of `privacy.json`.

    `page` and `terminal` are None where the table does not show it; `where` is whether
    `clients.csv` has it.
    """

    name: str
    page: Place | None = None
    terminal: Place | None = None
    is_text: bool = False
    where: _Rule = _always


_short, _aligned = "{:.4g}".format, "{:#.4g}".format
COLUMNS = (
    ClientColumn("client", Place(0, "client")),
    ClientColumn("name", Place(1, "name"), is_text=True, where=_known),
    ClientColumn("examples", Place(7, "examples", int, _known), Place(1, "examples", str, _known)),
    ClientColumn("delta", Place(6, "δ", delta_text), Place(5, "δ", delta_text, _differs)),
    ClientColumn("epsilon", Place(2, "ε", aligned_epsilon), Place(6, "ε", epsilon_text)),
    ClientColumn(
        "epsilon_rdp", Place(5, "ε by RDP", aligned_epsilon), Place(8, "ε (RDP)", epsilon_text)
    ),
    ClientColumn(
        "target_epsilon", Place(4, "target ε", or_dash), Place(9, "budget", or_dash, _known)
    ),
    ClientColumn("noise_multiplier", Place(9, "noise z", _aligned), Place(2, "z", _short)),
    ClientColumn("sampling_rate", Place(8, "sampling rate q", _aligned)),
    ClientColumn("rounds", Place(10, "rounds", int), Place(3, "rounds")),
    ClientColumn("steps", Place(11, "steps", int), Place(4, "steps")),
    ClientColumn("group", is_text=True),
    ClientColumn("withdrawn_round", terminal=Place(10, "left", or_dash, _known)),
    ClientColumn("clip_norm"),
    ClientColumn("against", is_text=True),
    ClientColumn(
        "epsilon_against_server",
        Place(3, "ε (server)", aligned_epsilon, _recorded),
        Place(7, "ε (server)", epsilon_text, _recorded),
    ),
)


def client_columns(rows: ClientRows) -> list[ClientColumn]:
    """Return the columns of `clients.csv`, in order; `name` only if clients have names."""
    return [column for column in COLUMNS if column.where(column.name, rows)]


def clients_table(rows: ClientRows) -> str:
    """Return the text of `clients.csv` for the clients' rows of `privacy.json`."""
    names = [column.name for column in client_columns(rows)]
    return csv_text(names, ([row.get(name) for name in names] for row in rows))


def client_places(table: Literal["page", "terminal"], rows: ClientRows) -> dict[str, Place]:
    """Return the `Place` of each column that a table shows, by column name, from left to right."""
    places = ((column.name, getattr(column, table)) for column in client_columns(rows))
    shown = [(name, place) for name, place in places if place and place.where(name, rows)]
    return dict(sorted(shown, key=lambda pair: pair[1].order))
