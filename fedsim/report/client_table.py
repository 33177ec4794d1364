"""The report's table of clients, as HTML rows and as JSON for the page's script.

With privacy, the table has every client's privacy spend. Without privacy, it has each client's
number of examples and of rounds.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter

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
_Entry = tuple[int, str | None, Mapping[str, CellValue], Mapping[str, str]]
"""A client's number, name, cells by column, and notes: texts by the kind to filter by."""


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
    pairs, is_long = list(zip(rows, facts.clients, strict=True)), len(rows) > MAX_CLIENTS
    if is_long:
        pairs.sort(key=lambda pair: (-pair[1].epsilon, pair[1].client))
    # None is marked where all share the largest ε.
    tied = len(facts.worst_clients) == len(facts.clients)
    largest = frozenset(() if tied else facts.worst_clients)
    loose = frozenset(facts.clients_with_large_delta)
    places = client_places("page", rows)
    headings = {name: place.heading for name, place in places.items()}
    if facts.trust.observers:
        headings["epsilon"] = epsilon_heading(facts, facts.trust.observers[0])
    if facts.objections:
        headings |= {name: f"reported {headings[name]}" for name in ("epsilon", "epsilon_rdp")}
    # Many clients share a value: each is written once.
    texts = {name: cache(place.text) for name, place in places.items() if name not in _IDENTITY}
    entries: list[_Entry] = []
    for row, client in pairs:
        cells = {name: text(row.get(name)) for name, text in texts.items()}
        notes = _spend_notes(client, lost, largest, loose)
        entries.append((row["client"], row.get("name"), cells, notes))
    return _make_table(headings, entries, sorted_by="epsilon" if is_long else "client")


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
    entries: list[_Entry] = []
    for row in rows:
        client = row["client"]
        count, score = rounds.get(client, 0), (scores or {}).get(client, _NOTHING)
        cells = {"examples": row["examples"], "rounds": count, "score": score}
        notes = _last_notes(lost.get(client, 0), has_trained=count > 0)
        entries.append((client, row.get("name"), cells, notes))
    return _make_table(headings, entries, sorted_by="client")


def _make_table(
    headings: Mapping[str, str], entries: Sequence[_Entry], *, sorted_by: str
) -> ClientTable:
    """Return a table of clients; the entries are in the order of the page."""
    headings = {**headings, "notes": "notes"}
    columns = [key for key in headings if key not in _IDENTITY]
    names: dict[int, str] = {}
    if "name" in headings:
        names = {
            client: name or _NOTHING for client, name, _, _ in sorted(entries, key=itemgetter(0))
        }
    shown = SHOWN_CLIENTS if len(entries) > MAX_CLIENTS else len(entries)
    kinds: dict[Cells, list[int]] = {}
    filters: dict[str, None] = {}
    first_rows: list[Cells] = []
    for client, _, cells, notes in entries:
        filters |= dict.fromkeys(notes)
        texts = {**cells, "notes": "; ".join(notes.values()) or _NOTHING}
        kind = tuple(texts[key] for key in columns)
        kinds.setdefault(kind, []).append(client)
        if len(first_rows) < shown:
            first_rows.append((client, *([names[client]] if names else ()), *kind))
    return ClientTable(headings, kinds, tuple(first_rows), sorted_by, tuple(filters), names)


def _spend_notes(
    client: ClientFacts, lost: Mapping[int, int], largest: frozenset[int], loose: frozenset[int]
) -> dict[str, str]:
    """Return the notes on a client's spend: withdrawal, lost updates, largest ε."""
    has_no_bound = math.isinf(client.epsilon)
    marks = {
        "no bound": has_no_bound,
        "largest ε": client.client in largest and client.has_charges and not has_no_bound,
        "over target": client.is_over_target,
        "δ too large": client.client in loose,
    }
    notes = {kind: kind for kind, is_marked in marks.items() if is_marked}
    if client.withdrawn_round is not None:
        notes["withdrew"] = f"withdrew in round {client.withdrawn_round:,}"
    return notes | _last_notes(lost.get(client.client, 0), has_trained=client.has_charges)


def _last_notes(lost: int, *, has_trained: bool) -> dict[str, str]:
    """Return the notes on lost updates, and on a client that never trained."""
    notes = {"lost updates": count_text(lost, "lost update")} if lost else {}
    return notes if has_trained else {**notes, "never trained": "never trained"}
