"""Readers of privacy ledgers, from a run directory or from a file, also of other tools.

A file has fedsim's events, `{"type": "PoissonSampled", "sampling_rate": q, "event": {...}}`; those
of dp-accounting, `{"type": "PoissonSampledDpEvent", "sampling_probability": q, "event": {...}}`;
the `history` of an Opacus accountant, a list of `[noise_multiplier, sample_rate, n]`; an entry of
registry.opendp.org, read as one release with the declared guarantee; or training (`training.py`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsim.accountant import (
    ZCDP,
    Composed,
    EpsilonDelta,
    Event,
    FixedSizeSampled,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    PrivacyLedger,
    SelfComposed,
    event_from_dict,
)
from fedsim.accountant.accountants import AccountantChoice
from fedsim.accountant.events import Adjacency
from fedsim.accountant.ledger.journal import FileJournal, total_against_server, total_of
from fedsim.accountant.trust import CLAIMED_AGAINST, Observer
from fedsim.core.errors import InputError, raised_as
from fedsim.core.text_formats import parse_json, parse_plain_yaml
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.tools.totals.training import TrainingFile, read_training

EVERYONE = ""
"""Key of the ledger in a file that names no clients."""


class SourceError(InputError):
    """Error of a run or file that cannot be added to privacy totals; the message names it."""


def ledger_of(records: object) -> PrivacyLedger:
    """Return the ledger of a list whose elements are events or `{"event": EVENT, "count": n}`."""
    if not isinstance(records, list):
        raise SourceError(f"a ledger must be a list of events, got {records!r:.80}")
    ledger = PrivacyLedger()
    for place, record in enumerate(records):
        try:
            is_counted = isinstance(record, Mapping) and set(record) == {"event", "count"}
            event, count = (record["event"], record["count"]) if is_counted else (record, 1)
            ledger.record(event_of(event), count)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"key {error} is missing" if isinstance(error, KeyError) else error
            raise SourceError(f"event {place}: {problem}") from error
    return ledger


def opacus_ledger(history: Any) -> PrivacyLedger:
    """Return the ledger of the `history` of an accountant of Opacus.

    Guarantee: the ledger is that of the recorded history, which may differ from what ran. Opacus
    records Poisson sampling even if the loader shuffled (`poisson_sampling=False`).
    """
    ledger = PrivacyLedger()
    for place, entry in enumerate(history if isinstance(history, list) else [history]):
        try:
            noise, rate, steps = entry
            ledger.record(PoissonSampled(rate, Gaussian(noise)), steps)
        except (TypeError, ValueError) as error:
            raise SourceError(
                f"history entry {place} must be [noise_multiplier, sample_rate, steps], got "
                f"{entry!r:.80}: {error}"
            ) from error
    return ledger


def event_of(record: Any) -> Event:
    """Return the event that a JSON object describes, in the notation of fedsim or dp-accounting."""
    name = record.get("type") if isinstance(record, Mapping) else None
    if not isinstance(name, str) or not name.endswith(_SUFFIX):
        return event_from_dict(record)
    read = _DP_ACCOUNTING.get(name.removesuffix(_SUFFIX))
    if read is None:
        known = ", ".join(f"{known}{_SUFFIX}" for known in _DP_ACCOUNTING)
        raise SourceError(f"no accounting rule for {name!r} of dp-accounting; known are {known}")
    return read(record)


def _zcdp(record: Mapping[str, Any]) -> Event:
    if record.get("xi", 0.0):
        raise SourceError(f"ZCDpEvent with xi={record['xi']!r} has no accounting rule here; only 0")
    return ZCDP(record["rho"])


_SUFFIX = "DpEvent"
_DP_ACCOUNTING: Mapping[str, Callable[[Mapping[str, Any]], Event]] = {
    "NoOp": lambda record: Composed(()),
    "NonPrivate": lambda record: NonPrivate(),
    "Gaussian": lambda record: Gaussian(record["noise_multiplier"]),
    "Laplace": lambda record: EpsilonDelta(1.0 / record["noise_multiplier"], 0.0),
    "EpsilonDelta": lambda record: EpsilonDelta(record["epsilon"], record["delta"]),
    "ZC": _zcdp,
    "PoissonSampled": lambda r: PoissonSampled(r["sampling_probability"], event_of(r["event"])),
    "SampledWithoutReplacement": lambda record: FixedSizeSampled(
        record["source_dataset_size"], record["sample_size"], event_of(record["event"])
    ),
    "SelfComposed": lambda record: SelfComposed(event_of(record["event"]), record["count"]),
    "Composed": lambda record: Composed(tuple(map(event_of, record["events"]))),
}


def registry_ledger(deployment: Any) -> PrivacyLedger:
    """Return the ledger of `deployment` in a registry entry: one release with its guarantee.

    `rho` (zCDP) counts before `epsilon` with `delta` (0 if absent), which follows from it. An entry
    without either is of tier 1 and declares nothing: its ε is infinite.
    """
    loss = _mapping("deployment", deployment).get("privacy_loss") or {}
    parameters = _mapping("deployment.privacy_loss", loss).get("privacy_parameters") or {}
    _mapping("deployment.privacy_loss.privacy_parameters", parameters)
    units = loss.get("number_of_privacy_units", 1)
    if units != 1:
        fix = "give the guarantee of one"
        raise SourceError(f"the entry is for {units} privacy units at once; {fix}")
    try:
        if "rho" in parameters:
            return PrivacyLedger().record(ZCDP(parameters["rho"]))
        if "epsilon" in parameters:
            delta = parameters.get("delta", 0.0)
            return PrivacyLedger().record(EpsilonDelta(parameters["epsilon"], delta))
    except (TypeError, ValueError) as error:
        raise SourceError(f"deployment.privacy_loss.privacy_parameters: {error}") from error
    return PrivacyLedger().record(NonPrivate())


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        rule = "must be a mapping, as in an entry of the registry"
        raise SourceError(f"{name} {rule}, got {value!r}")
    return value


# Reader of each key that an object without clients may have.
_LEDGERS: Mapping[str, Callable[[Any], PrivacyLedger]] = {
    "ledger": ledger_of,
    "history": opacus_ledger,
    "deployment": registry_ledger,
}


@dataclass(frozen=True)
class ClientRecord:
    """What a source tells of one client."""

    ledger: PrivacyLedger
    name: str | None = None  # in the data
    delta: float | None = None  # None for a ledger, and for a run that has none before its end
    against_server: PrivacyLedger | None = None  # of a run under distributed trust
    chain: tuple[str, ...] = ()  # hashes of the records; equal ones mean the same charges


@dataclass(frozen=True)
class Source:
    """The clients of one run or file, and what it tells of their guarantee.

    `charges_tell` is whether equal charges, beside equal `releases`, imply equal releases: if every
    charged round has its text in `releases`, or for seeded noise under local trust, as a charge has
    a digest of the server's request, which then determines the noise and the examples.
    """

    name: str  # path of the run or file as the user gave it
    clients: Mapping[str, ClientRecord]
    is_run: bool = False  # of fedsim
    is_finished: bool = True
    training: TrainingFile | None = None
    unit: str | None = None  # that ε protects; None for a ledger
    adjacency: Adjacency | None = None
    observer: Observer | None = None  # the strongest one against whom a run's ledgers hold
    accountant: AccountantChoice | None = None
    seed: int | None = None  # of all noise of a run; None for noise from the operating system
    releases: tuple[str, ...] = ()  # a text for each finished round, to compare runs
    charges_tell: bool = True
    assignment: str = ""  # equal for two runs if clients with equal numbers have the same examples


def read_source(name: str) -> Source:
    """Read a source: a run, a ledger, events, a training file, or an entry of the registry."""
    path = Path(name)
    if path.is_dir():
        return _read_run(name, RunDirectory.open(path))
    if not path.is_file():
        raise SourceError(f"{name}: there is no such run or file")
    if path.suffix == ".jsonl":
        histories = FileJournal(path).histories()
        if not histories:
            raise SourceError(f"{name}: the ledger has no record")
        return Source(name, {str(k): ClientRecord(total_of(c)) for k, c in histories.items()})
    try:
        text = path.read_text()
        is_yaml = path.suffix in (".yaml", ".yml")
        content: Any = parse_plain_yaml(text) if is_yaml else parse_json(text)
    except ValueError as error:
        raise SourceError(f"{name}: neither JSON nor YAML: {error}") from error
    if isinstance(content, Mapping) and {"training", "claimed"} & content.keys():
        file = read_training(name)
        told = file.training
        clients = {EVERYONE: ClientRecord(told.ledger(), delta=told.delta)}
        return Source(name, clients, training=file, unit=told.unit, adjacency=told.adjacency)
    with raised_as(SourceError, f"{name}: "):
        return Source(name, _clients_of(content))


def _read_run(name: str, directory: RunDirectory) -> Source:
    files = RunFiles(directory)
    experiment, privacy = files.experiment, files.experiment.privacy
    if privacy is None:
        raise SourceError(
            f"{name}: the run trained without privacy (privacy: null), so no client that took part "
            "in it has a finite ε; leave it out only if its models and results never left you"
        )
    histories = {str(client): charges for client, charges in files.histories.items()}
    recorded = files.optional("privacy.json") or {"clients": []}  # none before the run has ended
    rows: dict[str, Any] = {str(row["client"]): row for row in recorded["clients"]}
    trust, is_seeded = privacy.trust.name, privacy.noise == "seeded"
    delta = None if privacy.delta == "auto" else privacy.delta  # which the end of the run tells
    clients = dict[str, ClientRecord]()
    for client in dict.fromkeys([*histories, *rows]):
        charges, row = histories.get(client, ()), rows.get(client, {})
        ledger = total_of(charges)
        if row and row.get("epsilon") is None:  # a condition of the claim failed
            ledger.record(NonPrivate())
        is_hidden = trust == "distributed"
        server = (total_against_server(charges) or PrivacyLedger()) if is_hidden else None
        chain = tuple(charge.hash for charge in charges)
        name_, delta_ = row.get("name") or None, row.get("delta") or delta
        clients[client] = ClientRecord(ledger, name_, delta_, server, chain)
    if not clients:
        raise SourceError(f"{name}: no client of the run has spent anything")
    rounds = [charge.round_number for charges in histories.values() for charge in charges]
    releases = [json.dumps([r.model, sorted(r.uploads.items())]) for r in files.releases]
    is_natural = experiment.data.partition.scheme in ("column", "files")
    settings = [experiment.data.model_dump(mode="json"), None if is_natural else experiment.seed]
    return Source(
        name,
        clients,
        is_run=True,
        is_finished=bool(rows),
        unit=privacy.unit,
        adjacency=privacy.adjacency.name,
        observer=CLAIMED_AGAINST[trust],
        accountant=privacy.accounting,
        seed=experiment.seed if is_seeded else None,
        releases=tuple(releases),
        charges_tell=max(rounds, default=0) <= len(releases) or (is_seeded and trust == "local"),
        assignment=json.dumps(settings, sort_keys=True),
    )


def _clients_of(content: Any) -> dict[str, ClientRecord]:
    if isinstance(content, list):
        content = {"ledger": content}
    if isinstance(content, Mapping):
        if content.get("clients"):
            return _of_rows(content["clients"])
        for key, read in _LEDGERS.items():
            if key in content:
                return {EVERYONE: ClientRecord(read(content[key]))}
    raise SourceError(
        "neither a list of events, nor an object with 'clients', 'ledger', 'history' (Opacus), "
        "'training' (a training file) or 'deployment' (an entry of the registry)"
    )


def _of_rows(rows: Any) -> dict[str, ClientRecord]:
    clients = dict[str, ClientRecord]()
    for place, row in enumerate(rows if isinstance(rows, list) else [rows]):
        if not isinstance(row, Mapping) or "client" not in row or "ledger" not in row:
            raise SourceError(f"clients[{place}] must have the keys 'client' and 'ledger'")
        key = str(row["client"])
        if key in clients:
            raise SourceError(f"clients[{place}]: client {key} is there twice")
        ledger = ledger_of(row["ledger"])
        if "epsilon" in row and row["epsilon"] is None:
            ledger.record(NonPrivate())
        clients[key] = ClientRecord(ledger, str(row["name"]) if row.get("name") else None)
    return clients


def read_clients(name: str) -> Mapping[str, Sequence[str]]:
    """Read a file that maps each client to its places in the sources (`account_of`)."""
    try:
        content: Any = parse_plain_yaml(Path(name).read_text())
    except ValueError as error:
        raise SourceError(f"{name}: not YAML: {error}") from error
    is_map = isinstance(content, dict) and all(
        isinstance(places, list) and all(isinstance(place, str) for place in places)
        for places in content.values()
    )
    if not is_map:
        raise SourceError(
            f"{name}: must map each client to a list of places such as runs/a:3, got "
            f"{type(content).__name__}"
        )
    return {str(client): places for client, places in content.items()}


def repeats(first: Source, second: Source) -> bool:
    """Return whether every release of the run `first` is also a release of the run `second`.

    The charges and the records of what was released must both be equal. Equal charges alone are not
    enough: under secure noise, or if clients are drawn in secret, charges do not depend on the
    examples, and a secure sum depends on other clients, too. For a charged round without a record
    of its releases, equal charges suffice where they imply equal releases (`charges_tell`).
    """
    if not (first.is_run and second.is_run and any(c.chain for c in first.clients.values())):
        return False
    if first.releases != second.releases[: len(first.releases)]:
        return False
    unknown = ClientRecord(PrivacyLedger())
    return first.charges_tell and all(
        second.clients.get(client, unknown).chain[: len(record.chain)] == record.chain
        for client, record in first.clients.items()
    )


def renamed(source: Source, clients: Mapping[str, str]) -> Source:
    """Return a copy of a source with the clients of a map from new to old keys, without names."""
    moved = {new: replace(source.clients[old], name=None) for new, old in clients.items()}
    return replace(source, clients=moved)
