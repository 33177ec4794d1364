"""The report's tables of clients: all of them, also as JSON for the page's script, and failures."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from fedsim.core.formatting import count_text, shortened
from fedsim.report.client_data import held_out_accuracies
from fedsim.report.contents import RunContents
from fedsim.runs.client_columns import COLUMNS, client_places
from fedsim.statement import ClientFacts
from fedsim.statement.guarantee import epsilon_heading

MAX_CLIENTS = 200
SHOWN_CLIENTS = 100
_NOTHING = "–"
_MAX_REASON_CHARS = 301
_IDENTITY = ("client", "name")

Cells = tuple[str | int, ...]
# A client's values by column, and notes: texts by the kind to filter by.
_Entry = tuple[Mapping[str, Any], Mapping[str, str]]


@dataclass(frozen=True)
class ClientTable:
    """The table of all clients as text, with one row for each kind of clients.

    Clients of a kind have equal rows, except for number and name. A hundred thousand clients have
    only a few kinds, so the page stays small.
    """

    headings: Mapping[str, str]  # by the column's key; number (and name, if any) come first
    kinds: Mapping[Cells, Sequence[int]]  # clients by their row without number and name
    first_rows: tuple[Cells, ...]  # with number and name, for a browser that runs no scripts
    sorted_by: str  # key of the column that gives the initial order
    notes: tuple[str, ...]  # all types of notes, by which a reader can filter the rows
    names: Mapping[int, str]  # by number; empty where clients have only numbers

    def to_json(self) -> Markup:
        """Return the table as JSON for the page's script, safe inside `<script>`.

        The numbers of a kind's clients are written as the first number, then the differences.
        """
        members = map(sorted, self.kinds.values())
        content = {
            "keys": [*self.headings],
            "kinds": [*self.kinds],
            "members": [[b - a for a, b in pairwise((0, *numbers))] for numbers in members],
            "names": self.names,
            "sorted_by": self.sorted_by,
        }
        return htmlsafe_json_dumps(content, separators=(",", ":"))


def client_table(contents: RunContents) -> ClientTable | None:
    """Return the table of every client; of over 200, the largest ε come first. None if empty."""
    if not contents.clients:
        return None
    # By client, the number of updates that never reached an average.
    lost = Counter(entry["client"] for row in contents.rounds for entry in row["failed"])
    make = _spend_table if contents.facts.is_private else _plain_table
    return make(contents, lost)


def _spend_table(contents: RunContents, lost: Counter[int]) -> ClientTable:
    facts, rows = contents.facts, contents.clients
    pairs, is_long = list(zip(rows, facts.clients, strict=True)), len(rows) > MAX_CLIENTS
    if is_long:
        pairs.sort(key=lambda pair: (-pair[1].epsilon, pair[1].client))
    # None is marked where all share the largest ε.
    tied = len(facts.worst_clients) == len(facts.clients)
    largest = frozenset(() if tied else facts.worst_clients)
    loose = frozenset(facts.clients_with_large_delta)
    headings = {name: place.heading for name, place in client_places("page", rows).items()}
    if facts.trust.observers:
        headings["epsilon"] = epsilon_heading(facts, facts.trust.observers[0])
    if facts.objections:
        headings |= {name: f"reported {headings[name]}" for name in ("epsilon", "epsilon_rdp")}
    entries = [(row, _spend_notes(client, lost, largest, loose)) for row, client in pairs]
    return _make_table(headings, entries, sorted_by="epsilon" if is_long else "client")


def _plain_table(contents: RunContents, lost: Counter[int]) -> ClientTable:
    """Return the table of clients for a federation without privacy."""
    rounds = Counter(client for row in contents.rounds for client in row["participants"])
    scores = held_out_accuracies(contents)
    shown = client_places("page", contents.clients)
    headings = {name: shown[name].heading for name in _IDENTITY if name in shown}
    if scores:
        headings["score"] = "held-out accuracy"
    headings |= {name: shown[name].heading for name in ("examples", "rounds")}
    entries: list[_Entry] = []
    for row in contents.clients:
        client = row["client"]
        score, count = scores.get(client, _NOTHING), rounds[client]
        notes = _last_notes(lost[client], has_trained=count > 0)
        entries.append(({**row, "rounds": count, "score": score}, notes))
    return _make_table(headings, entries, sorted_by="client")


def _make_table(
    headings: Mapping[str, str], entries: Sequence[_Entry], *, sorted_by: str
) -> ClientTable:
    """Return a table of clients; the entries are in the order of the page."""
    columns = [key for key in headings if key not in _IDENTITY]
    # Many clients share a value: each is written once.
    texts = {column.name: cache(column.page.text) for column in COLUMNS if column.page}
    by_client = sorted(entries, key=lambda entry: entry[0]["client"])
    named = by_client if "name" in headings else ()
    names = {row["client"]: row.get("name") or _NOTHING for row, _ in named}
    shown = SHOWN_CLIENTS if len(entries) > MAX_CLIENTS else len(entries)
    kinds: dict[Cells, list[int]] = {}
    filters: dict[str, None] = {}
    first_rows: list[Cells] = []
    for row, notes in entries:
        client = row["client"]
        filters |= dict.fromkeys(notes)
        cells = (texts.get(key, str)(row.get(key)) for key in columns)
        kind = (*cells, "; ".join(notes.values()) or _NOTHING)
        kinds.setdefault(kind, []).append(client)
        if len(first_rows) < shown:
            first_rows.append((client, *([names[client]] if names else ()), *kind))
    headings = {**headings, "notes": "notes"}
    return ClientTable(headings, kinds, tuple(first_rows), sorted_by, tuple(filters), names)


def _spend_notes(
    client: ClientFacts, lost: Counter[int], largest: frozenset[int], loose: frozenset[int]
) -> dict[str, str]:
    """Return the notes on a client's spend: withdrawal, lost updates, largest ε."""
    is_finite = not math.isinf(client.epsilon)
    marks = {
        "no bound": not is_finite,
        "largest ε": client.client in largest and client.has_charges and is_finite,
        "over target": client.is_over_target,
        "δ too large": client.client in loose,
    }
    notes = {kind: kind for kind, is_marked in marks.items() if is_marked}
    if client.withdrawn_round is not None:
        notes["withdrew"] = f"withdrew in round {client.withdrawn_round:,}"
    return notes | _last_notes(lost[client.client], has_trained=client.has_charges)


def _last_notes(lost: int, *, has_trained: bool) -> dict[str, str]:
    """Return the notes on lost updates, and on a client that never trained."""
    notes = {"lost updates": count_text(lost, "lost update")} if lost else {}
    return notes if has_trained else {**notes, "never trained": "never trained"}


def incidents(contents: RunContents) -> list[tuple[int, int, str]]:
    """Return (round, client, what happened) for all failures and withdrawals of clients, sorted."""
    entries = [
        (row["round"], entry["client"], before + shortened(str(entry["reason"]), _MAX_REASON_CHARS))
        for row in contents.rounds
        for before, listed in (("", row["failed"]), ("withdrew: ", row["withdrawn"]))
        for entry in listed
    ]
    return sorted(entries, key=lambda entry: entry[:2])
