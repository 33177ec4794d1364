"""The table of clients: rows for a page without scripts, columns for the script.

With privacy it has every client's spend, ε first, so that a narrow screen shows it. Without, it has
the sizes of clients and their rounds.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.statement import ClientFacts, Facts
from fedsim.statement.certificate_words import SHORT_NAMES
from fedsim.statement.sentence import count_text

MAX_CLIENTS = 200
SHOWN_CLIENTS = 100

# Above this number of clients, a curve replaces the bars.
MAX_BARS = 40

_NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """One column: its name in `clients.csv`, and its heading."""

    key: str
    heading: str


_SERVER = "epsilon_against_server"
_NAME = Column("name", "name")
COLUMNS = (
    Column("client", "client"),
    Column("epsilon", "ε"),
    Column("target_epsilon", "target ε"),
    Column("epsilon_rdp", "ε by RDP"),
    Column("delta", "δ"),
    Column("examples", "examples"),
    Column("sampling_rate", "sampling rate q"),
    Column("noise_multiplier", "noise z"),
    Column("rounds", "rounds"),
    Column("steps", "steps"),
    Column("notes", "notes"),
)
PLAIN_COLUMNS = (
    Column("client", "client"),
    Column("examples", "examples"),
    Column("rounds", "rounds"),
    Column("notes", "notes"),
)

CellValue = str | int
ClientRow = tuple[CellValue, ...]


@dataclass(frozen=True)
class ClientTable:
    """Every client as text for people, in the order of `table_columns`.

    Attributes:
        columns: the columns.
        rows: all clients, in their initial order.
        shown: number of rows on a page without scripts.
        sorted_by: the column of the initial order.
        notes: all kinds of notes in the table, to filter by.
    """

    columns: tuple[Column, ...]
    rows: tuple[ClientRow, ...]
    shown: int
    sorted_by: str
    notes: tuple[str, ...]

    @property
    def has_names(self) -> bool:
        """Whether clients have names."""
        return _NAME in self.columns

    def to_json(self) -> Markup:
        """Return all clients for the script: one array for each column, safe inside `<script>`."""
        columns = [list(column) for column in zip(*self.rows, strict=True)]
        content = {
            "keys": [column.key for column in self.columns],
            "columns": columns,
            "sorted_by": self.sorted_by,
        }
        text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
        # JSON strings only: no character that could end the element or begin a comment is left.
        for character in "<>&":
            text = text.replace(character, f"\\u{ord(character):04x}")
        return Markup(text)


def client_table(
    facts: Facts, rows: Sequence[Mapping[str, Any]], lost: Mapping[int, int]
) -> ClientTable:
    """Return the table of every client's spend; above 200 clients, the largest ε come first.

    Args:
        facts: the facts of the run.
        rows: the clients of `privacy.json`, in the order of `facts.clients`.
        lost: for each client the number of charged updates that never arrived.
    """
    columns = with_names(table_columns(facts), rows)
    order = list(range(len(rows)))
    if len(rows) > MAX_CLIENTS:
        order.sort(key=lambda place: (-facts.clients[place].epsilon, facts.clients[place].client))
    largest = clients_above_others(facts)
    return make_table(
        columns,
        [_spend_cells(facts.clients[place], rows[place]) for place in order],
        [_spend_notes(facts, facts.clients[place], lost, largest) for place in order],
        sorted_by="epsilon" if len(rows) > MAX_CLIENTS else "client",
    )


def plain_table(
    rows: Sequence[Mapping[str, Any]],
    rounds: Mapping[int, int],
    lost: Mapping[int, int],
    scores: Mapping[int, str] | None = None,
) -> ClientTable:
    """Return the table of the clients of a federation without privacy.

    Args:
        rows: the clients of `privacy.json`.
        rounds: rounds in which each client's update was in the average.
        lost: updates of each client that never arrived.
        scores: accuracy of the final model on each client's held-out examples; None: not measured.
    """
    columns = PLAIN_COLUMNS
    if scores is not None:
        columns = (columns[0], Column("score", "held-out accuracy"), *columns[1:])
    numbers = [row["client"] for row in rows]
    cells = [
        {
            "client": number,
            "name": row.get("name") or _NOTHING,
            "examples": row["examples"],
            "rounds": rounds.get(number, 0),
            "score": (scores or {}).get(number, _NOTHING),
        }
        for number, row in zip(numbers, rows, strict=True)
    ]
    notes = [_lost_notes(lost.get(number, 0)) for number in numbers]
    for found, number in zip(notes, numbers, strict=True):
        if not rounds.get(number):
            found.append(("never trained", "never trained"))
    return make_table(with_names(columns, rows), cells, notes, sorted_by="client")


def make_table(
    columns: tuple[Column, ...],
    cells: Sequence[Mapping[str, CellValue]],
    notes: Sequence[Sequence[tuple[str, str]]],
    *,
    sorted_by: str,
) -> ClientTable:
    """Return a table from the cells of each client by column.

    Args:
        columns: the columns to show, `notes` last.
        cells: of each client, by key of a column.
        notes: of each client: (kind to filter by, text).
        sorted_by: the column of the given order.
    """
    rows = []
    for each, found in zip(cells, notes, strict=True):
        named = {**each, "notes": "; ".join(text for _, text in found) or _NOTHING}
        rows.append(tuple(named[column.key] for column in columns))
    kinds = dict.fromkeys(kind for found in notes for kind, _ in found)
    shown = SHOWN_CLIENTS if len(rows) > MAX_CLIENTS else len(rows)
    return ClientTable(columns, tuple(rows), shown, sorted_by, tuple(kinds))


def with_names(
    columns: tuple[Column, ...], rows: Sequence[Mapping[str, Any]]
) -> tuple[Column, ...]:
    """Return the columns, with the clients' names after their numbers where they have names."""
    if not any(row.get("name") for row in rows):
        return columns
    return (columns[0], _NAME, *columns[1:])


def table_columns(facts: Facts) -> tuple[Column, ...]:
    """Return the columns, each ε with its observer where trust is not local.

    Without a supported ε, the headings say "reported ε". Sizes of clients that are private have no
    column.
    """
    found: list[Column] = []
    for column in COLUMNS:
        if column.key == "examples" and facts.protects_clients:
            continue
        heading = column.heading
        if column.key == "epsilon" and facts.trust.trust != "local" and facts.trust.observers:
            heading = f"ε ({SHORT_NAMES[facts.trust.observers[0]]})"
        if facts.objections and column.key in ("epsilon", "epsilon_rdp"):
            heading = f"reported {heading}"
        found.append(Column(column.key, heading))
        if column.key == "epsilon" and facts.trust.trust == "distributed":
            found.append(Column(_SERVER, f"ε ({SHORT_NAMES['server']})"))
    return tuple(found)


def clients_above_others(facts: Facts) -> frozenset[int]:
    """Return the clients with the largest ε as printed; none where all clients tie."""
    largest = facts.worst_clients
    return frozenset() if len(largest) == len(facts.clients) else frozenset(largest)


def aligned_epsilon(epsilon: float | None) -> str:
    """Return `epsilon_text` padded to 4 digits, so that the numbers of a column align."""
    text = epsilon_text(epsilon)
    digits = sum(character.isdigit() for character in text.lstrip("0."))
    if digits == 0 or digits >= 4:
        return text
    return text + ("" if "." in text else ".") + "0" * (4 - digits)


def _spend_cells(client: ClientFacts, row: Mapping[str, Any]) -> dict[str, CellValue]:
    target = client.target_epsilon
    return {
        "client": client.client,
        "name": row.get("name") or _NOTHING,
        "epsilon": aligned_epsilon(client.epsilon),
        _SERVER: aligned_epsilon(row.get(_SERVER)),
        "target_epsilon": _NOTHING if target is None else f"{target:g}",
        "epsilon_rdp": aligned_epsilon(row.get("epsilon_rdp")),
        "delta": delta_text(client.delta),
        "examples": client.examples,
        "sampling_rate": f"{client.sampling_rate:#.4g}",
        "noise_multiplier": f"{client.noise_multiplier:#.4g}",
        "rounds": client.rounds,
        "steps": client.steps,
    }


def _spend_notes(
    facts: Facts, client: ClientFacts, lost: Mapping[int, int], largest: frozenset[int]
) -> list[tuple[str, str]]:
    """Return the notes on a client: (kind to filter by, text)."""
    notes = []
    if math.isinf(client.epsilon):
        notes.append(("no bound", "no bound"))
    elif client.client in largest and client.has_charges:
        notes.append(("largest ε", "largest ε"))
    if client.target_epsilon is not None and client.epsilon > client.target_epsilon:
        notes.append(("over target", "over target"))
    if client.has_large_delta and not facts.protects_clients:
        notes.append(("δ too large", "δ too large"))
    if client.withdrawn_round is not None:
        notes.append(("withdrew", f"withdrew in round {client.withdrawn_round:,}"))
    notes += _lost_notes(lost.get(client.client, 0))
    if not client.has_charges:
        notes.append(("never trained", "never trained"))
    return notes


def _lost_notes(count: int) -> list[tuple[str, str]]:
    return [("lost updates", count_text(count, "lost update"))] if count else []
