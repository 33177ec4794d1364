"""The files of a run as checks read them; the spend of clients against the ledger, and every ε.

The ledger is the root of trust: each client's records form a hash chain with its head in
`privacy.json`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from safetensors import SafetensorError

from fedsim.accountant import FleetAccountant, PrivacyLedger
from fedsim.accountant.accountants import AccountantChoice, choose_accountant, renyi_choice
from fedsim.accountant.events import Adjacency
from fedsim.accountant.fleet import Client
from fedsim.accountant.ledger.journal import (
    FileJournal,
    JournalError,
    total_against_server,
    total_of,
)
from fedsim.accountant.sampler_slack import SHARE, sampler_slack
from fedsim.algorithms.state import ServerState
from fedsim.clients.mechanisms.kinds import KINDS
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.durable import GENESIS
from fedsim.core.errors import FedsimError
from fedsim.experiment import ExperimentWithClients, read_settings
from fedsim.runs.directory import RunDirectory
from fedsim.runs.recorded_figures import ANSWERS
from fedsim.server.round_report import RoundRow
from fedsim.statement.privacy_file import PrivacyFile, PrivateClientRow

# What code meets in content that no run wrote: another type, a missing key, an absurd number.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    SafetensorError,
    TypeError,
    ValueError,
)


def attempt(files: str, check: Callable[[], Iterable[str]]) -> list[str]:
    """Return the problems that a check finds; content that it cannot read is a problem, too.

    Args:
        files: the names of the files that the check reads, for the message.
        check: yields the problems.
    """
    problems: list[str] = []
    try:
        for problem in check():
            problems.append(problem)
    except FedsimError as error:
        problems.append(str(error))
    except _MALFORMED as error:
        problems.append(f"{files}: no run writes such content: {error!r:.200}")
    return problems


class RunFiles:
    """The files of a run directory, read at most once; a damaged file raises when it is read."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    @cached_property
    def environment(self) -> dict[str, Any]:
        """`environment.json`."""
        return self.directory.read_json("environment.json")

    @cached_property
    def experiment(self) -> ExperimentWithClients:
        """`experiment.yaml`; what it names outside of the run directory is not looked at."""
        return read_settings(self.directory.path / "experiment.yaml")

    @cached_property
    def privacy(self) -> PrivacyFile:
        """`privacy.json`."""
        return cast(PrivacyFile, self.directory.read_json("privacy.json"))

    @property
    def rows(self) -> list[PrivateClientRow]:
        """The clients of `privacy.json`."""
        return cast(list[PrivateClientRow], self.privacy["clients"])

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        return self.directory.read_json("summary.json")

    @cached_property
    def rounds(self) -> list[RoundRow]:
        """`rounds.jsonl`."""
        return self.directory.read_rounds()

    @cached_property
    def state(self) -> ServerState | None:
        """The state in `checkpoint/model.safetensors`; None before the first round."""
        found = self.directory.read_checkpoint()
        return None if found is None else found.state

    @cached_property
    def journal(self) -> FileJournal:
        """`ledger.jsonl`: whole, chained records and nothing else.

        Raises:
            JournalError: it is missing, or a record is cut short or changed; the message names it.
        """
        path = self.directory.ledger
        if not path.is_file():
            raise JournalError(f"{path.name} is missing: it holds what every client has spent")
        journal = FileJournal(path)
        records = sum(len(journal.history(client)) for client in journal.clients())
        data = path.read_bytes()
        if data.count(b"\n") != records or (data and not data.endswith(b"\n")):
            raise JournalError(f"{path.name}, record {records + 1}: cut short or changed")
        return journal


_SAME = 1e-9  # relative: the same method on the same ledger, on another machine
_BEYOND = 1e-3  # absolute: largest excess of a tighter method's bound over a looser one's


@dataclass(frozen=True)
class Checked:
    """One client's ε by the run's own accountant and by the other one, for one observer.

    Attributes:
        client: its number.
        reported: ε in `privacy.json`.
        recomputed: ε of the ledger by the run's accountant, as this version computes it.
        other: ε of the ledger by the other accountant.
    """

    client: int
    reported: float
    recomputed: float
    other: float


@dataclass(frozen=True)
class _Reported:
    """What a row of `privacy.json` reports for one observer.

    Attributes:
        row: the row.
        epsilon: ε by the run's accountant; infinite for null.
        epsilon_rdp: ε by Rényi DP; None where it is not reported.
        ledger: the ledger.
        observer: "" for the claimed view, else an addition to the name of ε.
    """

    row: PrivateClientRow
    epsilon: float
    epsilon_rdp: float | None
    ledger: PrivacyLedger
    observer: str = ""


def check_spend(files: RunFiles, checked: list[Checked]) -> Iterator[str]:
    """Yield what is wrong with the spend of any client.

    Each client's own accountant recomputes its ε by the run's method, for each observer. The other
    methods compute all clients together. Both are independent of the run: they read the ledgers in
    the file alone.

    Args:
        files: the files of the run.
        checked: receives every client whose ε was recomputed.
    """
    privacy, journal, rows = files.privacy, files.journal, files.rows
    name, adjacency = privacy["accountant"], privacy["adjacency"]
    if name is None or adjacency is None:
        if journal.clients():
            yield "a run without privacy has a ledger"
        return
    try:
        accountant = choose_accountant(name, privacy.get("orders"))
    except ValueError as error:
        yield f"privacy.json has orders that no accountant takes: {error}"
        return
    scheme = SAMPLING_SCHEMES.get(privacy["sampling"] or "")
    by_epoch = scheme is not None and scheme.by_epoch
    kind = KINDS.get((privacy.get("mechanism") or {}).get("name", ""))
    if kind is not None and kind.later_rounds_are_free:
        by_epoch = True
    by_query = (files.directory.path / ANSWERS).exists()  # `plan_problems` counts them
    shared = privacy["trust"] == "distributed"
    for row in rows:
        for what in _against_ledger(row, journal, by_epoch=by_epoch or by_query, shared=shared):
            yield f"client {row['client']}: {what}"
    for client in sorted(set(journal.clients()) - {row["client"] for row in rows}):
        yield f"client {client}: in the ledger only"
    views = [_claimed(rows), _against_server(rows)] if shared else [_claimed(rows)]
    for place, reported in enumerate(views):
        bounds_of_rows = _bounds(reported, accountant, adjacency)
        for one, bounds in zip(reported, bounds_of_rows, strict=True):
            result, found = _recomputed(one, bounds, accountant)
            if place == 0:
                checked.append(result)
            for what in found:
                yield f"client {one.row['client']}: {what}"


def _claimed(rows: list[PrivateClientRow]) -> list[_Reported]:
    return [
        _Reported(
            row,
            number(row["epsilon"]),
            number(row["epsilon_rdp"]),
            PrivacyLedger.from_list(row["ledger"]),
        )
        for row in rows
    ]


def _against_server(rows: list[PrivateClientRow]) -> list[_Reported]:
    """Return what rows of distributed trust report against the server."""
    return [
        _Reported(
            row,
            number(row.get("epsilon_against_server")),
            None,
            PrivacyLedger.from_list(row.get("ledger_against_server") or []),
            " against the server",
        )
        for row in rows
    ]


def _against_ledger(
    row: PrivateClientRow, journal: FileJournal, *, by_epoch: bool, shared: bool
) -> Iterator[str]:
    """Yield the differences between a row and the client's records.

    Args:
        row: of `privacy.json`.
        journal: the ledger.
        shared: whether the run has a second ledger, against the server.
        by_epoch: whether an event pays for all steps of an epoch, or of the whole run, at once, as
            that of noisy examples does, or a step has an event for each query of a ballot.
    """
    history = journal.history(row["client"])
    total = total_of(history)
    if total.to_list() != row["ledger"]:
        yield "privacy.json and ledger.jsonl disagree on what was spent"
    if shared and any(charge.against_server is None for charge in history):
        yield "ledger.jsonl has a record without a charge against the server"
        return
    second = total_against_server(history) or (PrivacyLedger() if shared else None)
    if (None if second is None else second.to_list()) != row.get("ledger_against_server"):
        yield "privacy.json and ledger.jsonl disagree on what was spent against the server"
    if (history[-1].hash if history else GENESIS) != row["ledger_head"]:
        yield "the last record in ledger.jsonl is not the one that privacy.json names"
    if len(history) != row["rounds"]:
        yield f"{row['rounds']} rounds reported, {len(history)} in ledger.jsonl"
    steps = sum(charge.steps for charge in history)
    if steps != row["steps"]:
        yield f"{row['steps']} steps reported, {steps} in ledger.jsonl"
    paid = sum(count for _, count in total.entries)
    if steps != paid and not by_epoch:
        yield f"{steps} steps in ledger.jsonl, which charges for {paid}"


def _bounds(
    reported: list[_Reported], accountant: AccountantChoice, adjacency: Adjacency
) -> list[dict[AccountantChoice, float]]:
    """Return ε of every row by each method, for one observer.

    Each client's own accountant computes the run's method; the others compute all rows together.

    Args:
        reported: the rows of `privacy.json` for this observer.
        accountant: the run's.
        adjacency: of every ledger.
    """
    bounds: list[dict[AccountantChoice, float]] = [{} for _ in reported]
    rows, ledgers = [one.row for one in reported], [one.ledger for one in reported]
    for name in dict.fromkeys(("pld", renyi_choice(accountant), accountant)):
        if name == accountant:
            for found, row, ledger in zip(bounds, rows, ledgers, strict=True):
                found[name] = ledger.epsilon_with_slack(row["delta"], name, adjacency)
            continue
        fleet = FleetAccountant(name, adjacency=adjacency)
        for place, ledger in enumerate(ledgers):
            for event, count in ledger.entries:
                fleet.compose(place, event, count)
        deltas: dict[Client, float] = {
            place: row["delta"] * (1.0 - SHARE) for place, row in enumerate(rows)
        }
        together = fleet.get_epsilon(deltas).values()
        for found, row, epsilon in zip(bounds, rows, together, strict=True):
            added = sampler_slack(epsilon, row["delta"]).epsilon if epsilon > 0.0 else 0.0
            found[name] = epsilon + added
    return bounds


def _recomputed(
    one: _Reported,
    by: dict[AccountantChoice, float],
    accountant: AccountantChoice,
) -> tuple[Checked, list[str]]:
    """Compare a reported ε with its recomputed ones by each method."""
    reported: dict[AccountantChoice, float] = {accountant: one.epsilon}
    if one.epsilon_rdp is not None:
        reported[renyi_choice(accountant)] = one.epsilon_rdp
    problems = [
        f"ε{one.observer} by {name} is reported as {value:.6g} and recomputed as {by[name]:.6g}"
        for name, value in reported.items()
        if not same_number(value, by[name])
    ]
    for tight, loose in pairwise(by):
        if by[tight] > by[loose] + _BEYOND:
            problems.append(
                f"ε{one.observer} by {tight} ({by[tight]:.6g}) exceeds its bound by {loose} "
                f"({by[loose]:.6g})"
            )
    other: AccountantChoice = "rdp" if accountant == "pld" else "pld"
    return Checked(one.row["client"], reported[accountant], by[accountant], by[other]), problems


def number(value: float | None) -> float:
    """Return an ε of a file; null is an infinite one."""
    return math.inf if value is None else value


def same_number(one: float, other: float) -> bool:
    """Whether two figures are the same, computed on two machines."""
    return one == other or math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-12)
