"""The report's table of clients, as HTML rows and as JSON for the page's script.

With privacy, the table has every client's privacy spend. Without privacy, it has each client's
number of examples and of rounds.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from markupsafe import Markup

from fedsim.core.formatting import count_text
from fedsim.runs.client_columns import ClientRows, client_places
from fedsim.statement import ClientFacts, Facts
from fedsim.statement.guarantee import epsilon_heading

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
        kinds: numbers of the clients of each kind, by the kind's row of texts without number and
            name.
        first_rows: the first rows with number and name, for a browser that runs no scripts.
        sorted_by: key of the column that gives the initial order.
        notes: all types of notes in the table, by which a reader can filter the rows.
        names: public name of each client, by number; empty where clients have only numbers.
    """

    headings: Mapping[str, str]
    kinds: Mapping[Cells, Sequence[int]]
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
            "kinds": [*self.kinds],
            "members": [_steps(sorted(clients)) for clients in self.kinds.values()],
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
    # None is marked where all share the largest ε.
    tied = len(facts.worst_clients) == len(facts.clients)
    largest = frozenset(() if tied else facts.worst_clients)
    loose = frozenset(facts.clients_with_large_delta)
    places = client_places("page", rows)
    # Many clients share a value: each is written once.
    texts = {name: cache(place.text) for name, place in places.items() if name not in _IDENTITY}
    return _make_table(
        _headings(facts, {name: place.heading for name, place in places.items()}),
        rows,
        order,
        cells_of=lambda index: {name: text(rows[index].get(name)) for name, text in texts.items()},
        notes_of=lambda index: _spend_notes(facts.clients[index], lost, largest, loose),
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

    def cells_of(index: int) -> dict[str, CellValue]:
        client = rows[index]["client"]
        score = (scores or {}).get(client, _NOTHING)
        return {
            "examples": rows[index]["examples"],
            "rounds": rounds.get(client, 0),
            "score": score,
        }

    def notes_of(index: int) -> list[Note]:
        client = rows[index]["client"]
        notes = _lost_notes(lost.get(client, 0))
        return notes if rounds.get(client) else [*notes, ("never trained", "never trained")]

    return _make_table(
        {**headings, "notes": "notes"},
        rows,
        range(len(rows)),
        cells_of=cells_of,
        notes_of=notes_of,
        sorted_by="client",
    )


def _make_table(
    headings: Mapping[str, str],
    rows: ClientRows,
    order: Sequence[int],
    *,
    cells_of: Callable[[int], Mapping[str, CellValue]],
    notes_of: Callable[[int], Sequence[Note]],
    sorted_by: str,
) -> ClientTable:
    """Return a table of clients.

    `order` has indices into `rows`, as the page first shows the clients. `cells_of` and `notes_of`
    are functions from such an index to the texts of the row by column key, without number and name,
    and to the notes on the client.
    """
    columns = [key for key in headings if key not in _IDENTITY]
    names: dict[int, str] = {}
    if "name" in headings:
        names = {row["client"]: row.get("name") or _NOTHING for row in rows}
    shown = SHOWN_CLIENTS if len(rows) > MAX_CLIENTS else len(rows)
    kinds: dict[Cells, list[int]] = {}
    filters: dict[str, None] = {}
    first_rows: list[Cells] = []
    for index in order:
        noted = notes_of(index)
        filters |= dict.fromkeys(kind for kind, _ in noted)
        cells = {**cells_of(index), "notes": "; ".join(text for _, text in noted) or _NOTHING}
        kind = tuple(cells[key] for key in columns)
        client = rows[index]["client"]
        kinds.setdefault(kind, []).append(client)
        if len(first_rows) < shown:
            first_rows.append((client, *([names[client]] if names else ()), *kind))
    return ClientTable(headings, kinds, tuple(first_rows), sorted_by, tuple(filters), names)


def _headings(facts: Facts, headings: dict[str, str]) -> dict[str, str]:
    """Return the headings; the heading of ε names the observer where trust is not local.

    Without a supported ε, the headings say "reported ε".
    """
    if facts.trust.observers:
        headings["epsilon"] = epsilon_heading(facts, facts.trust.observers[0])
    if facts.objections:
        for name in ("epsilon", "epsilon_rdp"):
            headings[name] = f"reported {headings[name]}"
    return {**headings, "notes": "notes"}


def _spend_notes(
    client: ClientFacts, lost: Mapping[int, int], largest: frozenset[int], loose: frozenset[int]
) -> list[Note]:
    """Return the notes on a client's spend: withdrawal, lost updates, largest ε."""
    notes = []
    if math.isinf(client.epsilon):
        notes.append(("no bound", "no bound"))
    elif client.client in largest and client.has_charges:
        notes.append(("largest ε", "largest ε"))
    if client.target_epsilon is not None and client.epsilon > client.target_epsilon:
        notes.append(("over target", "over target"))
    if client.client in loose:
        notes.append(("δ too large", "δ too large"))
    if client.withdrawn_round is not None:
        notes.append(("withdrew", f"withdrew in round {client.withdrawn_round:,}"))
    notes += _lost_notes(lost.get(client.client, 0))
    if not client.has_charges:
        notes.append(("never trained", "never trained"))
    return notes


def _lost_notes(count: int) -> list[Note]:
    return [("lost updates", count_text(count, "lost update"))] if count else []
