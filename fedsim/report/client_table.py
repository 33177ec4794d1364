"""The report's table of clients, as HTML rows and as JSON for the page's script.

With privacy, the table has every client's privacy spend. Without privacy, it has each client's
number of examples and of rounds.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from fedsim.core.formatting import count_text
from fedsim.runs.client_columns import ClientRows, client_places
from fedsim.statement import ClientFacts, Facts

MAX_CLIENTS = 200
SHOWN_CLIENTS = 100

# Above this number of clients, a curve replaces the bars.
MAX_BARS = 40

_NOTHING = "–"
_IDENTITY = ("client", "name")

CellValue = str | int
Cells = tuple[CellValue, ...]
Note = tuple[str, str]
"""A note on a client: (kind to filter by, text)."""


@dataclass(frozen=True)
class ClientTable:
    """The table of all clients as text, with one row for each kind of clients.

    Clients of a kind have equal rows, except for number and name. A hundred thousand clients have
    only a few kinds, so the page stays small.

    Attributes:
        headings: heading of each column, by the column's key; the first columns are the client's
            number and, if clients have names, the name.
        kinds: the row of each kind as texts, without number and name.
        members: numbers of the clients of each kind, ascending.
        first_rows: the first rows with number and name, for a browser that runs no scripts.
        sorted_by: key of the column that gives the initial order.
        notes: all types of notes in the table, by which a reader can filter the rows.
        names: public name of each client, by number; empty where clients have only numbers.
    """

    headings: Mapping[str, str]
    kinds: tuple[Cells, ...]
    members: tuple[tuple[int, ...], ...]
    first_rows: tuple[Cells, ...]
    sorted_by: str
    notes: tuple[str, ...]
    names: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> Markup:
        """Return the table as JSON for the page's script, safe inside `<script>`.

        The numbers of a kind's clients are written as the first number, then the differences.
        """
        content = {
            "keys": [*self.headings],
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


def client_table(facts: Facts, rows: ClientRows, lost: Mapping[int, int]) -> ClientTable:
    """Return the table of every client's privacy spend.

    With over 200 clients, those with the largest ε come first.

    Args:
        facts: the recorded facts on the run's privacy, on which its privacy statement is based.
        rows: the clients' rows of `privacy.json`, in the order of `facts.clients`.
        lost: number of charged updates that never reached an average, by client.
    """
    order = list(range(len(rows)))
    if len(rows) > MAX_CLIENTS:
        order.sort(key=lambda place: (-facts.clients[place].epsilon, facts.clients[place].client))
    largest = clients_above_others(facts)
    shown = client_places("page", rows)
    texts = {name: column.text for name, column in shown.items() if name not in _IDENTITY}

    def kind_of(place: int) -> tuple[object, ...]:
        client = facts.clients[place]
        noted = client.withdrawn_round, lost.get(client.client, 0), client.client in largest
        return *map(rows[place].get, texts), *noted

    return make_table(
        _headings(facts, {name: column.heading for name, column in shown.items()}),
        rows,
        order,
        kind_of=kind_of,
        cells_of=lambda place: {name: text(rows[place].get(name)) for name, text in texts.items()},
        notes_of=lambda place: _spend_notes(facts, facts.clients[place], lost, largest),
        sorted_by="epsilon" if len(rows) > MAX_CLIENTS else "client",
    )


def plain_table(
    rows: ClientRows,
    rounds: Mapping[int, int],
    lost: Mapping[int, int],
    scores: Mapping[int, str] | None = None,
) -> ClientTable:
    """Return the table of clients for a federation without privacy.

    Args:
        rows: the clients' rows of `privacy.json`.
        rounds: number of rounds whose average contains the client's update, by client.
        lost: number of updates that never reached an average, by client.
        scores: accuracy of the final model on the client's held-out examples, by client; None
            where it was not measured.
    """
    shown = client_places("page", rows)
    headings = {name: shown[name].heading for name in _IDENTITY if name in shown}
    if scores is not None:
        headings["score"] = "held-out accuracy"
    headings |= {name: shown[name].heading for name in ("examples", "rounds")}
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
        {**headings, "notes": "notes"},
        rows,
        range(len(rows)),
        kind_of=lambda place: (*cells_of(place).values(), lost.get(numbers[place], 0)),
        cells_of=cells_of,
        notes_of=notes_of,
        sorted_by="client",
    )


def make_table(
    headings: Mapping[str, str],
    rows: ClientRows,
    order: Sequence[int],
    *,
    kind_of: Callable[[int], tuple[object, ...]],
    cells_of: Callable[[int], Mapping[str, CellValue]],
    notes_of: Callable[[int], Sequence[Note]],
    sorted_by: str,
) -> ClientTable:
    """Return a table of clients; a row is computed once for each kind of clients with equal rows.

    Args:
        headings: heading of each column to show, by key, `notes` last.
        rows: the clients' rows of `privacy.json`.
        order: indices into `rows`, in the order in which the page first shows the clients.
        kind_of: function from an index to a key; clients with equal keys have equal texts and
            notes.
        cells_of: function from an index to the texts of the client's row, by column key, without
            number and name.
        notes_of: function from an index to the notes on the client.
        sorted_by: key of the column that gives the initial order.
    """
    members: dict[tuple[object, ...], list[int]] = {}
    for place in order:
        members.setdefault(kind_of(place), []).append(place)
    columns = [key for key in headings if key not in _IDENTITY]
    kinds: dict[tuple[object, ...], Cells] = {}
    filters: dict[str, None] = {}
    for key, places in members.items():
        noted = notes_of(places[0])
        filters |= dict.fromkeys(kind for kind, _ in noted)
        notes = "; ".join(text for _, text in noted) or _NOTHING
        cells = {**cells_of(places[0]), "notes": notes}
        kinds[key] = tuple(cells[key] for key in columns)
    names: dict[int, str] = {}
    if "name" in headings:
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
        headings,
        tuple(kinds.values()),
        tuple(
            tuple(sorted(rows[place]["client"] for place in of_kind))
            for of_kind in members.values()
        ),
        tuple(first_rows),
        sorted_by,
        tuple(filters),
        names,
    )


def _headings(facts: Facts, headings: dict[str, str]) -> dict[str, str]:
    """Return the headings; the heading of ε names the observer where trust is not local.

    Without a supported ε, the headings say "reported ε".
    """
    if facts.trust.trust != "local" and facts.trust.observers:
        headings["epsilon"] = f"ε ({facts.trust.observers[0]})"
    if facts.objections:
        for name in ("epsilon", "epsilon_rdp"):
            headings[name] = f"reported {headings[name]}"
    return {**headings, "notes": "notes"}


def clients_above_others(facts: Facts) -> frozenset[int]:
    """Return the clients whose printed ε is the largest; none if all have the same ε."""
    largest = facts.worst_clients
    return frozenset() if len(largest) == len(facts.clients) else frozenset(largest)


def _spend_notes(
    facts: Facts, client: ClientFacts, lost: Mapping[int, int], largest: frozenset[int]
) -> list[Note]:
    """Return the notes on a client's spend: withdrawal, lost updates, largest ε."""
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
