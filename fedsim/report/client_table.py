"""The table of clients: rows for a page without scripts, kinds and numbers for the script.

With privacy it has every client's spend, ε first, so that a narrow screen shows it. Without, it has
the sizes of clients and their rounds.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from fedsim.core.formatting import count_text, delta_text, epsilon_text
from fedsim.statement import ClientFacts, Facts

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
_IDENTITY = ("client", "name")
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
Note = tuple[str, str]
"""(kind to filter by, text)"""


@dataclass(frozen=True)
class ClientTable:
    """Every client as text for people: kinds of clients with equal cells, and who is of which.

    A hundred thousand clients have few kinds of cells, so the page holds their numbers alone.

    Attributes:
        columns: the columns; the first are the client's number and, with names, its name.
        kinds: the other cells of each kind.
        members: the clients of each kind, ascending.
        first_rows: whole rows for a page without scripts, in their initial order.
        sorted_by: the column of the initial order.
        notes: all kinds of notes in the table, to filter by.
        names: public name of each client by number; empty: they have numbers alone.
    """

    columns: tuple[Column, ...]
    kinds: tuple[ClientRow, ...]
    members: tuple[tuple[int, ...], ...]
    first_rows: tuple[ClientRow, ...]
    sorted_by: str
    notes: tuple[str, ...]
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def has_names(self) -> bool:
        """Whether clients have names."""
        return _NAME in self.columns

    def to_json(self) -> Markup:
        """Return all clients for the script, safe inside `<script>`.

        The members of a kind are the first number and the steps from one number to the next.
        """
        content = {
            "keys": [column.key for column in self.columns],
            "kinds": self.kinds,
            "members": [_steps(clients) for clients in self.members],
            "names": self.names,
            "sorted_by": self.sorted_by,
        }
        text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
        # JSON strings only: no character that could end the element or begin a comment is left.
        for character in "<>&":
            text = text.replace(character, f"\\u{ord(character):04x}")
        return Markup(text)


def _steps(numbers: Sequence[int]) -> list[int]:
    return [number - before for before, number in zip((0, *numbers), numbers, strict=False)]


def client_table(
    facts: Facts, rows: Sequence[Mapping[str, Any]], lost: Mapping[int, int]
) -> ClientTable:
    """Return the table of every client's spend; above 200 clients, the largest ε come first.

    Args:
        facts: the facts of the run.
        rows: the clients of `privacy.json`, in the order of `facts.clients`.
        lost: for each client the number of charged updates that never arrived.
    """
    order = list(range(len(rows)))
    if len(rows) > MAX_CLIENTS:
        order.sort(key=lambda place: (-facts.clients[place].epsilon, facts.clients[place].client))
    largest = clients_above_others(facts)

    def kind_of(place: int) -> tuple[object, ...]:
        """Return all that the cells of a client depend on."""
        client, row = facts.clients[place], rows[place]
        number = client.client
        spent = client.epsilon, client.target_epsilon, row.get(_SERVER), row.get("epsilon_rdp")
        plan = client.delta, client.examples, client.sampling_rate, client.noise_multiplier
        times = client.rounds, client.steps, client.withdrawn_round
        return *spent, *plan, *times, lost.get(number, 0), number in largest

    return make_table(
        with_names(table_columns(facts), rows),
        rows,
        order,
        kind_of=kind_of,
        cells_of=lambda place: _spend_cells(facts.clients[place], rows[place]),
        notes_of=lambda place: _spend_notes(facts, facts.clients[place], lost, largest),
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

    def cells_of(place: int) -> dict[str, CellValue]:
        return {
            "examples": rows[place]["examples"],
            "rounds": rounds.get(numbers[place], 0),
            "score": (scores or {}).get(numbers[place], _NOTHING),
        }

    def notes_of(place: int) -> list[Note]:
        notes = _lost_notes(lost.get(numbers[place], 0))
        never = not rounds.get(numbers[place])
        return [*notes, ("never trained", "never trained")] if never else notes

    return make_table(
        with_names(columns, rows),
        rows,
        range(len(rows)),
        kind_of=lambda place: (*cells_of(place).values(), lost.get(numbers[place], 0)),
        cells_of=cells_of,
        notes_of=notes_of,
        sorted_by="client",
    )


def make_table(
    columns: tuple[Column, ...],
    rows: Sequence[Mapping[str, Any]],
    order: Sequence[int],
    *,
    kind_of: Callable[[int], tuple[object, ...]],
    cells_of: Callable[[int], Mapping[str, CellValue]],
    notes_of: Callable[[int], Sequence[Note]],
    sorted_by: str,
) -> ClientTable:
    """Return a table from the cells of each kind of clients.

    Args:
        columns: the columns to show, `notes` last.
        rows: the clients of `privacy.json`.
        order: places in `rows`, in the initial order.
        kind_of: returns the key of a place; places with one key have equal cells and notes.
        cells_of: returns the cells of a place by key of a column, without number and name.
        notes_of: returns the notes of a place.
        sorted_by: the column of the given order.
    """
    members: dict[tuple[object, ...], list[int]] = {}
    for place in order:
        members.setdefault(kind_of(place), []).append(place)
    own = [column.key for column in columns if column.key not in _IDENTITY]
    kinds: dict[tuple[object, ...], ClientRow] = {}
    filters: dict[str, None] = {}
    for key, places in members.items():
        found = notes_of(places[0])
        filters |= dict.fromkeys(kind for kind, _ in found)
        notes = "; ".join(text for _, text in found) or _NOTHING
        cells = {**cells_of(places[0]), "notes": notes}
        kinds[key] = tuple(cells[column] for column in own)
    names: dict[int, str] = {}
    if _NAME in columns:
        names = {row["client"]: row.get("name") or _NOTHING for row in rows}
    shown = SHOWN_CLIENTS if len(rows) > MAX_CLIENTS else len(rows)
    first_rows = [
        (
            rows[place]["client"],
            *([rows[place].get("name") or _NOTHING] if names else ()),
            *kinds[kind_of(place)],
        )
        for place in order[:shown]
    ]
    return ClientTable(
        columns,
        tuple(kinds.values()),
        tuple(tuple(sorted(rows[place]["client"] for place in own)) for own in members.values()),
        tuple(first_rows),
        sorted_by,
        tuple(filters),
        names,
    )


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
            heading = f"ε ({facts.trust.observers[0]})"
        if facts.objections and column.key in ("epsilon", "epsilon_rdp"):
            heading = f"reported {heading}"
        found.append(Column(column.key, heading))
        if column.key == "epsilon" and facts.trust.trust == "distributed":
            found.append(Column(_SERVER, "ε (server)"))
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
) -> list[Note]:
    """Return the notes on a client."""
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


def _lost_notes(count: int) -> list[Note]:
    return [("lost updates", count_text(count, "lost update"))] if count else []
