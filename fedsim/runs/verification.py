"""Checks a run directory against its ledger: every ε recomputed, every record chained.

The ledger is the root of trust: each client's records form a hash chain with its head in
`privacy.json`. A copy of `privacy.json` shows whether any byte of the ledger changed since.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import fedsim
from fedsim.accountant import FleetAccountant, PrivacyLedger
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.adjacency import Adjacency
from fedsim.accountant.fleet.accountant import Client
from fedsim.accountant.ledger.journal import GENESIS, FileJournal, JournalError, total_of
from fedsim.clients.dp_sgd.sampling_schemes import SAMPLING_SCHEMES
from fedsim.runs.directory import RunDirectory
from fedsim.statement import read_facts, to_json
from fedsim.statement.privacy_file import PrivacyFile, PrivateClientRow
from fedsim.statement.recorded_facts import ledger_digest

_METHODS: tuple[AccountantName, ...] = ("pld", "rdp")
# Events that pay for all steps of an epoch at once.
_EPOCH_EVENTS = {scheme.event for scheme in SAMPLING_SCHEMES.values() if scheme.by_epoch}
_SAME = 1e-9  # relative: the same method on the same ledger, on another machine
_BEYOND = 1e-3  # absolute: largest excess of a tighter method's bound over a looser one's


@dataclass(frozen=True)
class Checked:
    """One client's ε by the run's own accountant and by the other one."""

    client: int
    reported: float
    recomputed: float
    other: float


@dataclass(frozen=True)
class Verification:
    """Result of a check.

    Attributes:
        clients: every client whose ε could be recomputed.
        problems: one line for each discrepancy; empty for a sound run.
        unchecked: one line for each fact of another version's run that could not be checked.
    """

    clients: tuple[Checked, ...]
    problems: tuple[str, ...]
    unchecked: tuple[str, ...] = ()


def verify_run(directory: RunDirectory) -> Verification:
    """Recompute every privacy figure of a run.

    Guarantee: in a sound result the records of every client form an unbroken chain up to the head
    in `privacy.json`, and the ledgers there are their sums. Two accountants confirm every reported
    ε: the run's own to equality, the looser one by a larger bound. `summary.json` and
    `clients.csv` repeat these ε.

    Each client's own accountant recomputes its ε by the run's method. The other methods compute all
    clients together. Both are independent of the run: they read the ledger in the file alone.

    Raises:
        RunDirectoryError: the run has no `privacy.json` yet, or a file is damaged.
        SchemaError: a newer fedsim wrote the run.
    """
    privacy = cast(PrivacyFile, directory.read_json("privacy.json"))
    found = _verified(directory, privacy)
    return replace(found, unchecked=tuple(_unchecked(directory, privacy)))


def _verified(directory: RunDirectory, privacy: PrivacyFile) -> Verification:
    try:
        journal = _whole(directory.ledger)
    except JournalError as error:
        return Verification((), (str(error),))
    accountant, adjacency = privacy["accountant"], privacy["adjacency"]
    if accountant is None or adjacency is None:
        extra = ["a run without privacy has a ledger"] if journal.clients() else []
        return Verification((), (*extra, *_words(privacy)))
    problems, checked = [], []
    rows = cast(list[PrivateClientRow], privacy["clients"])
    for row, bounds in zip(rows, _bounds(rows, accountant, adjacency), strict=True):
        problems += [f"client {row['client']}: {what}" for what in _against_ledger(row, journal)]
        result, found = _recomputed(row, bounds, accountant)
        checked.append(result)
        problems += [f"client {row['client']}: {what}" for what in found]
    unknown = set(journal.clients()) - {row["client"] for row in privacy["clients"]}
    problems += [f"client {client}: in the ledger only" for client in sorted(unknown)]
    problems += _figures(directory, privacy)
    problems += _words(privacy)
    return Verification(tuple(checked), tuple(problems))


def _whole(path: Path) -> FileJournal:
    """Return the journal of a file that holds whole, chained records and nothing else.

    Raises:
        JournalError: a record is cut short or changed; the message names it.
    """
    journal = FileJournal(path)
    records = sum(len(journal.history(client)) for client in journal.clients())
    data = path.read_bytes()
    if data.count(b"\n") != records or (data and not data.endswith(b"\n")):
        raise JournalError(f"{path.name}, record {records + 1}: cut short or changed")
    return journal


def _against_ledger(row: PrivateClientRow, journal: FileJournal) -> Iterator[str]:
    history = journal.history(row["client"])
    total = total_of(history)
    if total.to_list() != row["ledger"]:
        yield "privacy.json and ledger.jsonl disagree on what was spent"
    if (history[-1].hash if history else GENESIS) != row["ledger_head"]:
        yield "the last record in ledger.jsonl is not the one that privacy.json names"
    if len(history) != row["rounds"]:
        yield f"{row['rounds']} rounds reported, {len(history)} in ledger.jsonl"
    steps = sum(charge.steps for charge in history)
    if steps != row["steps"]:
        yield f"{row['steps']} steps reported, {steps} in ledger.jsonl"
    paid = sum(count for _, count in total.entries)
    by_epoch = any(type(event).__name__ in _EPOCH_EVENTS for event, _ in total.entries)
    if steps != paid and not by_epoch:
        yield f"{steps} steps in ledger.jsonl, which charges for {paid}"


def _bounds(
    rows: list[PrivateClientRow], accountant: AccountantName, adjacency: Adjacency
) -> list[dict[AccountantName, float]]:
    """Return ε of every row by each method.

    Each client's own accountant computes the run's method; the others compute all rows together.
    """
    bounds: list[dict[AccountantName, float]] = [{} for _ in rows]
    ledgers = [PrivacyLedger.from_list(row["ledger"]) for row in rows]
    for name in dict.fromkeys((*_METHODS, accountant)):
        if name == accountant:
            for found, row, ledger in zip(bounds, rows, ledgers, strict=True):
                found[name] = ledger.epsilon(row["delta"], name, adjacency)
            continue
        fleet = FleetAccountant(name, adjacency=adjacency)
        for place, ledger in enumerate(ledgers):
            for event, count in ledger.entries:
                fleet.compose(place, event, count)
        deltas: dict[Client, float] = {place: row["delta"] for place, row in enumerate(rows)}
        for found, epsilon in zip(bounds, fleet.get_epsilon(deltas).values(), strict=True):
            found[name] = epsilon
    return bounds


def _recomputed(
    row: PrivateClientRow, by: dict[AccountantName, float], accountant: AccountantName
) -> tuple[Checked, list[str]]:
    """Compare a row of `privacy.json` with its recomputed ε by each method."""
    reported: dict[AccountantName, float] = {
        accountant: _number(row["epsilon"]),
        "rdp": _number(row["epsilon_rdp"]),
    }
    problems = [
        f"ε by {name} is reported as {value:.6g} and recomputed as {by[name]:.6g}"
        for name, value in reported.items()
        if not _same(value, by[name])
    ]
    for tight, loose in pairwise(by):
        if by[tight] > by[loose] + _BEYOND:
            problems.append(
                f"ε by {tight} ({by[tight]:.6g}) exceeds its bound by {loose} ({by[loose]:.6g})"
            )
    other = "rdp" if accountant == "pld" else "pld"
    result = Checked(row["client"], reported[accountant], by[accountant], by[other])
    return result, problems


def _figures(directory: RunDirectory, privacy: PrivacyFile) -> Iterator[str]:
    largest = max(_number(row["epsilon"]) for row in privacy["clients"])
    if not _same(_number(privacy["system_epsilon"]), largest):
        yield f"system_epsilon is not the largest ε of any client, {largest:.6g}"
    summary = directory.read_json("summary.json")
    if not _same(_number(summary["epsilon"]["max"]), largest):
        yield f"summary.json does not name the largest ε, {largest:.6g}"
    table = (directory.path / "clients.csv").read_text(encoding="utf-8").splitlines()[1:]
    epsilons = [line.split(",")[3] for line in table]
    expected = [
        "" if row["epsilon"] is None else repr(row["epsilon"]) for row in privacy["clients"]
    ]
    if epsilons != expected:
        yield "clients.csv and privacy.json disagree"


def _unchecked(directory: RunDirectory, privacy: PrivacyFile) -> Iterator[str]:
    """Yield the facts of another version's run that this version cannot check."""
    if privacy.get("version") != fedsim.__version__:
        origin = directory.origin
        yield (
            "the wording of the privacy statement, which is that of fedsim "
            f"{privacy.get('version', origin.version)} (run schema {origin.schema}); "
            f"this is fedsim {fedsim.__version__}"
        )


def _words(privacy: PrivacyFile) -> Iterator[str]:
    """Yield the differences between the statement and the recorded facts."""
    if privacy.get("ledger_digest") != ledger_digest(privacy["clients"]):
        yield "ledger_digest is not that of the clients' ledgers"
    if privacy.get("version") != fedsim.__version__:
        return  # another version may word the same facts differently
    expected = to_json(read_facts(privacy))
    if [point["text"] for point in privacy.get("statement_points", [])] != [
        point["text"] for point in expected["statement_points"]
    ] or privacy["statement"] != expected["statement"]:
        yield "the statement does not follow from the figures beside it"


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _same(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-12)
