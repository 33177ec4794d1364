"""Ledger and budget of one data set of a node, charged by all experiments, seeds and runs.

The `ChainedFile` `STATE/data/NAME/ledger.jsonl` has the charges, as docs/howto/deployment.md says.
NAME is not a digest of the client's examples, since the server chooses the seed of the partition,
and thus which rows of a file are the client's. `STATE/counts/NAME` shows if a ledger was deleted or
replaced by an old copy; charges to such a ledger are refused.

A server may choose each experiment after it saw the answers to the earlier ones. The ε of an
ordinary accountant does not hold for such choices. A release is granted if one of these rules
grants it:

| rule                                                                     | share of δ |
|--------------------------------------------------------------------------|------------|
| all releases are of the same event, and their ε by PLD is in the budget  | 1/2        |
| Rényi filter at the order that affords most Gaussian releases            | 1/4        |
| Rényi filter at three quarters of that order, better for sampled events  | 1/4        |

Each rule alone is a privacy filter: if it grants all releases, they are (ε, δ')-DP, where δ' is the
rule's share of δ. The first rule is one since the event is chosen before any answer, and only the
number of releases depends on answers. The others are by Feldman, Zrnic 2021 (arXiv:2008.11193). A
rule that grants a release also granted all releases before it, so the rule that grants the last
release covers all of them. Which rule that is may depend on answers, so the δ of all releases is
bounded by the sum of all shares.

The budget holds against everybody whom the node does not trust. If an experiment's ε relies on more
trust than the node has, the node counts the ε that the client's own noise gives without that trust.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self, get_args

from pydantic import ValidationError

from fedsim.accountant import Event, NonPrivate, PrivacyFilter
from fedsim.accountant.events import Adjacency
from fedsim.accountant.ledger.journal import Charge, JournalError
from fedsim.accountant.sampler_slack import target_without_slack
from fedsim.accountant.trust import Trust
from fedsim.core.durable import ChainedFile, sync_directory
from fedsim.core.settings import Settings, first_mistake
from fedsim.data.settings import FileDataset
from fedsim.experiment import Experiment, LoadedExperiment
from fedsim.runs.records import LedgerField
from fedsim.tools.deployment.private_files import (
    DeploymentError,
    exclusive,
    make_private,
    write_whole,
)

Releases = Sequence[tuple[Event, int]]


def data_directory(state: Path, name: str | None, loaded: LoadedExperiment) -> Path:
    """Return the directory of the data ledger for an experiment on this node."""
    dataset = loaded.experiment.data.dataset
    if name is None and isinstance(dataset, FileDataset) and dataset.path is not None:
        path = loaded.base / Path(dataset.path).expanduser()
        try:
            with path.open("rb") as file:
                name = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DeploymentError(f"the data file {path} cannot be read: {reason}") from error
    return state / "data" / (name or "code")


class DataCharge(Settings):
    """One charge of an experiment to a data set, before it is appended to the ledger."""

    experiment: str
    seed: int
    client: int
    round: int
    request: str  # digest of everything that the client's answer depends on
    adjacency: Adjacency
    ledger: LedgerField  # the events that give the experiment's ε, which may rely on `trust`
    trust: Trust = "local"
    against_server: LedgerField | None = None  # None: as `ledger`, or no such noise

    @classmethod
    def of(cls, charge: Charge, experiment: Experiment) -> Self:
        """Return the charge to the data that a client's charge of an experiment stands for."""
        privacy = experiment.privacy
        return cls(
            experiment=experiment.name,
            seed=experiment.seed,
            client=charge.client,
            round=charge.round_number,
            request=charge.request,
            adjacency="zero_out" if privacy is None else privacy.adjacency.name,
            ledger=charge.ledger,
            trust="local" if privacy is None else privacy.trust.name,
            against_server=charge.against_server,
        )

    @property
    def place(self) -> tuple[int, int, int]:
        """The triple (seed, client, round); equal triples mean the same seeded noise."""
        return self.seed, self.client, self.round

    def counted(self, given: Trust) -> Releases:
        """Return the releases that count against the budget of a node that gives this trust."""
        own = None if self.against_server is None else self.against_server.entries
        return counted_releases(self.ledger.entries, own, given=given, needed=self.trust)


class DataLedger:
    """The ledger of all charges to one data set; open it by `open_data_ledger`, which locks it."""

    def __init__(self, path: Path, count: Path) -> None:
        self._chain, self._count = ChainedFile(path, raises=JournalError), count
        self.charges = list[DataCharge]()
        for number, content in enumerate(self._chain.records, start=1):
            try:
                self.charges.append(DataCharge(**content))
            except ValidationError as error:
                mistake = first_mistake(error)
                raise JournalError(f"{path}, line {number}: not a record: {mistake}") from error
        self._check_count(path)

    def append(self, charge: DataCharge) -> None:
        """Append a charge to the ledger; when this returns, it is on disk."""
        self._chain.append(charge.model_dump(mode="json", exclude_defaults=True))
        self.charges.append(charge)
        self._write_count()

    def _check_count(self, path: Path) -> None:
        """Check that all counted records exist; after a crash one record may not be counted yet."""
        heads = self._chain.heads
        counted = self._count.read_bytes() if self._count.exists() else b""
        if not counted and len(heads) == 1:
            self._write_count()
        elif counted not in (_counted(number, head) for number, head in enumerate(heads)):
            raise JournalError(
                f"{path} has {len(heads) - 1} records, and {self._count} counts others: one of "
                "them is an old copy, damaged or gone; restore both as they were after the last "
                "charge"
            )

    def _write_count(self) -> None:
        write_whole(self._count, _counted(len(self.charges), self._chain.heads[-1]).decode())


@contextmanager
def open_data_ledger(directory: Path) -> Iterator[DataLedger]:
    """Open the ledger of a data set, and lock it against other processes of the node.

    Raises:
        DeploymentError: another user owns or can open a file or directory of the ledger.
        JournalError: a record was changed or is missing.
    """
    state = directory.parent.parent
    counts = state / "counts"
    charged = state.glob("seed-*/client-*/ledger.jsonl") if not counts.exists() else ()
    for ledger in charged:
        if ledger.stat().st_size:
            raise JournalError(
                f"{counts} is gone, and {ledger} has charges: restore {state} as it was after the "
                "last charge"
            )
    with exclusive(directory, state=state):
        make_private(counts, is_directory=True)
        path = directory / "ledger.jsonl"
        is_new = not path.exists()
        make_private(path)
        for above in (directory, directory.parent, state) if is_new else ():
            sync_directory(above)
        yield DataLedger(path, counts / directory.name)


def _counted(number: int, head: str) -> bytes:
    return f"{number} {head}\n".encode()


def count_affordable(
    spent: Mapping[Event, int],
    wanted: Releases,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "zero_out",
) -> int:
    """Return how many of the wanted releases a budget covers after earlier spending.

    Guarantee: all releases that this function grants over time are together (epsilon, delta)-DP
    under the adjacency, however a server chooses them. An event without a privacy bound under it
    raises an UnsupportedEventError.
    """
    try:
        epsilon, delta = target_without_slack(epsilon, delta)
    except ValueError:  # the sampler's slack alone is more
        return 0
    events = {*spent, *(event for event, _ in wanted)}
    filters = _renyi_filters(epsilon, delta, adjacency)
    if len(events) == 1:
        filters.append(PrivacyFilter(epsilon, delta / 2, adjacency=adjacency))
    return max((_count_granted(budget, spent, wanted) for budget in filters), default=0)


def affords_anything(epsilon: float, delta: float) -> bool:
    """Return whether a budget can cover at least one release that has enough noise."""
    return bool(_renyi_filters(epsilon, delta, "zero_out"))


def _renyi_filters(epsilon: float, delta: float, adjacency: Adjacency) -> list[PrivacyFilter]:
    rule = partial(PrivacyFilter, epsilon, delta / 4, mode="adaptive", adjacency=adjacency)
    filters = list[PrivacyFilter]()
    with suppress(ValueError):  # the order leaves no budget at this ε and δ
        filters.append(rule())
        order = filters[0].order
        filters.append(rule(order=order and 0.75 * order))
    return filters


def _count_granted(budget: PrivacyFilter, spent: Mapping[Event, int], wanted: Releases) -> int:
    for event, count in spent.items():
        budget.record(event, count)
    total = 0
    for event, count in wanted:
        granted = budget.request(event, count)
        total += granted
        if granted < count:
            break
    return total


def suffices(given: Trust, needed: Trust) -> bool:
    """Return whether the trust of a node's policy covers the trust that an experiment's ε needs."""
    order = get_args(Trust)  # from the least trust
    return order.index(given) >= order.index(needed)


def counted_releases(
    claimed: Releases, against_server: Releases | None, *, given: Trust, needed: Trust
) -> Releases:
    """Return pairs (event, number of releases) that count against a node's privacy budget.

    `claimed` gives the experiment's ε under the trust that it needs. `against_server` gives the ε
    against an adversary who sees the client's own upload; None if no noise protects the upload.
    """
    if suffices(given, needed):
        return claimed
    return [(NonPrivate(), 1)] if against_server is None else against_server
