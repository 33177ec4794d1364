"""The table of every client's spend: rows for a page without scripts, columns for the script."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.statement import ClientFacts, Facts
from fedsim.statement.certificate_words import SHORT_NAMES

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
COLUMNS = (
    Column("client", "client"),
    Column("examples", "examples"),
    Column("sampling_rate", "sampling rate q"),
    Column("noise_multiplier", "noise z"),
    Column("rounds", "rounds"),
    Column("steps", "steps"),
    Column("delta", "δ"),
    Column("epsilon", "ε"),
    Column("epsilon_rdp", "ε by RDP"),
    Column("target_epsilon", "target ε"),
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


def client_table(facts: Facts, rows: Sequence[dict[str, Any]], lost: Counter[int]) -> ClientTable:
    """Return the table of all clients; above 200 clients, the largest ε come first.

    Args:
        facts: the facts of the run.
        rows: the clients of `privacy.json`, in the order of `facts.clients`.
        lost: for each client the number of charged updates that never arrived.
    """
    many = len(rows) > MAX_CLIENTS
    order = list(range(len(rows)))
    if many:
        order.sort(key=lambda place: (-facts.clients[place].epsilon, facts.clients[place].client))
    cells, kinds = [], []
    for place in order:
        notes = _notes(facts, facts.clients[place], lost)
        kinds += [kind for kind, _ in notes]
        cells.append(_cells(facts, place, rows[place], [text for _, text in notes]))
    return ClientTable(
        columns=table_columns(facts),
        rows=tuple(cells),
        shown=SHOWN_CLIENTS if many else len(cells),
        sorted_by="epsilon" if many else "client",
        notes=tuple(dict.fromkeys(kinds)),
    )


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


def aligned_epsilon(epsilon: float | None) -> str:
    """Return `epsilon_text` padded to 4 digits, so that the numbers of a column align."""
    text = epsilon_text(epsilon)
    digits = sum(character.isdigit() for character in text.lstrip("0."))
    if digits == 0 or digits >= 4:
        return text
    return text + ("" if "." in text else ".") + "0" * (4 - digits)


def _cells(facts: Facts, place: int, row: dict[str, Any], notes: list[str]) -> ClientRow:
    client = facts.clients[place]
    target = client.target_epsilon
    second = (aligned_epsilon(row.get(_SERVER)),) if facts.trust.trust == "distributed" else ()
    return (
        client.client,
        *(() if facts.protects_clients else (client.examples,)),
        f"{client.sampling_rate:#.4g}",
        f"{client.noise_multiplier:#.4g}",
        client.rounds,
        client.steps,
        delta_text(client.delta),
        aligned_epsilon(client.epsilon),
        *second,
        aligned_epsilon(row.get("epsilon_rdp")),
        _NOTHING if target is None else f"{target:g}",
        "; ".join(notes) or _NOTHING,
    )


def _notes(facts: Facts, client: ClientFacts, lost: Counter[int]) -> list[tuple[str, str]]:
    """Return the notes on a client: (kind to filter by, text)."""
    notes = []
    if math.isinf(client.epsilon):
        notes.append(("no bound", "no bound"))
    elif client.epsilon == facts.epsilon and client.has_charges:
        notes.append(("largest ε", "largest ε"))
    if client.target_epsilon is not None and client.epsilon > client.target_epsilon:
        notes.append(("over target", "over target"))
    if client.has_large_delta and not facts.protects_clients:
        notes.append(("δ too large", "δ too large"))
    if client.withdrawn_round is not None:
        notes.append(("withdrew", f"withdrew in round {client.withdrawn_round:,}"))
    if lost[client.client]:
        count = lost[client.client]
        notes.append(("lost updates", f"{count:,} lost update{'' if count == 1 else 's'}"))
    if not client.has_charges:
        notes.append(("never trained", "never trained"))
    return notes
