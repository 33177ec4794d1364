"""Checks of the privacy spend in `privacy.json` against the ledger; every ε is computed again.

The ledger is taken as true: each client's records form a hash chain, and `privacy.json` has the
last hash of each chain.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedsim.accountant import FleetAccountant, PrivacyLedger
from fedsim.accountant.accountants import AccountantChoice, choose_accountant, renyi_choice
from fedsim.accountant.events import Adjacency
from fedsim.accountant.fleet import Client
from fedsim.accountant.ledger.journal import Charge, total_against_server, total_of
from fedsim.accountant.sampler_slack import SHARE, sampler_slack
from fedsim.clients.mechanisms.kinds import KINDS
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.durable import GENESIS
from fedsim.core.errors import FedsimError
from fedsim.runs.directory import RunFiles
from fedsim.runs.recorded_figures import ANSWERS

# Errors of code that reads content that no run wrote: another type, a missing key, a huge number.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


def attempt(files: str, check: Callable[[], Iterable[str]]) -> list[str]:
    """Run a check and return the problems that it found; an unreadable file is a problem, too."""
    problems: list[str] = []
    try:
        for problem in check():
            problems.append(problem)
    except FedsimError as error:
        problems.append(str(error))
    except _MALFORMED as error:
        problems.append(f"{files}: no run writes such content: {error!r:.200}")
    return problems


def ledger_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each sign that `ledger.jsonl` is not whole: missing, or cut short.

    A JournalError names a record that does not fit its hash chain.
    """
    path = files.directory.ledger
    if not path.is_file():
        yield f"{path.name} is missing: it holds what every client has spent"
        return
    records, data = sum(map(len, files.charges.values())), path.read_bytes()
    if data and not data.endswith(b"\n"):
        yield f"{path.name}, record {records + 1}: cut short or changed"


_Epsilons = Mapping[AccountantChoice, float]
_SAME = 1e-9  # relative difference of one method on one ledger between machines
_BEYOND = 1e-3  # largest absolute excess of a tighter method's bound over a looser one's


def check_spend(files: RunFiles, epsilons: list[float]) -> Iterator[str]:
    """Yield a line for each mistake in the recorded privacy spend of any client.

    For each client and adversary, ε is recomputed from the ledgers in `privacy.json`: by the run's
    accountant, and by other accountants. `epsilons` gets each client's ε by the run's accountant.
    """
    privacy, charges, rows = files.privacy, files.charges, files.clients
    name, adjacency = privacy["accountant"], privacy["adjacency"]
    if name is None or adjacency is None:
        if charges:
            yield "a run without privacy has a ledger"
        return
    try:
        accountant = choose_accountant(name, privacy.get("orders"))
    except ValueError as error:
        yield f"privacy.json has orders that no accountant takes: {error}"
        return
    # An event pays for an epoch or the whole run, or is one of several of a step of a ballot.
    scheme = SAMPLING_SCHEMES.get(privacy["sampling"] or "")
    kind = KINDS.get((privacy.get("mechanism") or {}).get("name", ""))
    by_event = (
        (scheme is not None and scheme.by_epoch)
        or (kind is not None and kind.later_rounds_are_free)
        or "noise_correlation" in privacy
        or (files.directory.path / ANSWERS).exists()
    )
    shared = privacy["trust"] == "distributed"
    for row in rows:
        history = charges.get(row["client"], ())
        yield from of_client(row, _against_ledger(row, history, by_event=by_event, shared=shared))
        yield from of_client(row, _against_turns(history, privacy.get("noise_correlation")))
    for client in sorted(charges.keys() - {row["client"] for row in rows}):
        yield f"client {client}: in the ledger only"
    yield from _recomputed(files, accountant, adjacency, epsilons)


def of_client(row: Mapping[str, Any], problems: Iterable[str]) -> Iterator[str]:
    """Return problems with the number of the client that they concern."""
    return (f"client {row['client']}: {problem}" for problem in problems)


def _recomputed(
    files: RunFiles, accountant: AccountantChoice, adjacency: Adjacency, epsilons: list[float]
) -> Iterator[str]:
    """Yield a line for each ε, against each observer, that another computation contradicts."""
    rows = files.clients
    symbols = {"": "ε"}  # by the ending of the keys for an observer
    if files.privacy["trust"] == "distributed":
        symbols["_against_server"] = "ε against the server"
    for ending, symbol in symbols.items():
        ledgers = [PrivacyLedger.from_list(row[f"ledger{ending}"] or []) for row in rows]
        bounds = _bounds([row["delta"] for row in rows], ledgers, accountant, adjacency)
        for row, by in zip(rows, bounds, strict=True):
            reported: dict[AccountantChoice, float] = {accountant: number(row[f"epsilon{ending}"])}
            if not ending:
                reported[renyi_choice(accountant)] = number(row["epsilon_rdp"])
                epsilons.append(by[accountant])
            yield from of_client(row, _differences(reported, by, symbol))


def _against_ledger(
    row: Mapping[str, Any], history: Sequence[Charge], *, by_event: bool, shared: bool
) -> Iterator[str]:
    """Yield the differences between a row of `privacy.json` and the client's records, oldest first.

    With `by_event`, the numbers of events and steps may differ; `plan_problems` counts the events.
    `shared` is whether the run has a second ledger, against the server.
    """
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
    if steps != paid and not by_event:
        yield f"{steps} steps in ledger.jsonl, which charges for {paid}"


def _against_turns(history: Sequence[Charge], turns: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a problem where a client's charged rounds are closer, or more, than it is charged for.

    `turns` is the recorded correlation of noise, with its participation if it is over rounds.
    """
    if turns is None or "rounds_apart" not in turns:
        return
    apart, most = turns["rounds_apart"], turns["max_rounds"]
    rounds = [charge.round_number for charge in history]
    for earlier, later in pairwise(rounds):
        if later - earlier < apart:
            yield (
                f"charged in rounds {earlier} and {later}, and its noise is charged for rounds "
                f"that are at least {apart} apart"
            )
    if len(rounds) > most or max(rounds, default=0) > turns["rounds"]:
        yield (
            f"charged in {len(rounds)} rounds up to round {max(rounds)}, and its noise is charged "
            f"for at most {most} of {turns['rounds']} rounds"
        )


def _bounds(
    deltas: list[float], ledgers: list[PrivacyLedger], own: AccountantChoice, adjacency: Adjacency
) -> list[dict[AccountantChoice, float]]:
    """Return ε of every client against one observer, by each method.

    The run's method computes each client on its own, the other methods all clients together.
    """
    bounds: list[dict[AccountantChoice, float]] = [{} for _ in deltas]
    for name in dict.fromkeys(("pld", renyi_choice(own), own)):
        if name == own:
            for client, delta, ledger in zip(bounds, deltas, ledgers, strict=True):
                client[name] = ledger.epsilon_with_slack(delta, name, adjacency)
            continue
        fleet = FleetAccountant(name, adjacency=adjacency)
        for place, ledger in enumerate(ledgers):
            for event, count in ledger.entries:
                fleet.compose(place, event, count)
        ideal = dict[Client, float](enumerate(delta * (1.0 - SHARE) for delta in deltas))
        together = fleet.get_epsilon(ideal).values()
        for client, delta, epsilon in zip(bounds, deltas, together, strict=True):
            added = sampler_slack(epsilon, delta).epsilon if epsilon > 0.0 else 0.0
            client[name] = epsilon + added
    return bounds


def _differences(reported: _Epsilons, by: _Epsilons, symbol: str) -> Iterator[str]:
    """Yield each contradiction of reported ε with ε recomputed by each method, tightest first."""
    for name, value in reported.items():
        if not same_number(value, by[name]):
            yield f"{symbol} by {name} is reported as {value:.6g} and recomputed as {by[name]:.6g}"
    for (tight, least), (loose, most) in pairwise(by.items()):
        if least > most + _BEYOND:
            yield f"{symbol} by {tight} ({least:.6g}) exceeds its bound by {loose} ({most:.6g})"


def number(value: float | None) -> float:
    """Return an ε from a JSON file as a number; None (null in the file) becomes ∞."""
    return math.inf if value is None else value


def same_number(first: float, second: float) -> bool:
    """Whether two numbers are equal, up to rounding differences between machines."""
    return math.isclose(first, second, rel_tol=_SAME, abs_tol=1e-12)
