"""What a run recorded of its rounds: rows, releases and charges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fedsim.accountant.ledger.journal import Charge, FileJournal
from fedsim.runs.directory import RunDirectory
from fedsim.runs.releases_file import Releases, read_releases
from fedsim.server.round_report import RoundRow


@dataclass(frozen=True)
class RecordedRound:
    """What a run recorded of one round.

    Attributes:
        number: the round, from 1.
        row: its line of `rounds.jsonl`; None for a round that was interrupted.
        releases: its line of `releases.jsonl`; None likewise.
        charges: of the clients that were charged.
    """

    number: int
    row: RoundRow | None = None
    releases: Releases | None = None
    charges: Mapping[int, Charge] = field(default_factory=dict)

    @property
    def uploads(self) -> Mapping[int, str]:
        """Tag of each upload in clear."""
        return {} if self.releases is None else self.releases.uploads

    @cached_property
    def participants(self) -> frozenset[int]:
        """The clients in the aggregate."""
        return frozenset(() if self.row is None else self.row["participants"])

    @cached_property
    def asked(self) -> frozenset[int]:
        """The clients that trained: they were charged, sent an update, or took part."""
        return frozenset(self.charges) | frozenset(self.uploads) | self.participants

    @cached_property
    def withdrawals(self) -> Mapping[int, str]:
        """The reason of each client that left the federation."""
        rows = () if self.row is None else self.row["withdrawn"]
        return {one["client"]: str(one["reason"]) for one in rows}

    @cached_property
    def failures(self) -> Mapping[int, str]:
        """The reason of each client that failed."""
        rows = () if self.row is None else self.row["failed"]
        return {one["client"]: str(one["reason"]) for one in rows}


def read_recorded(directory: RunDirectory) -> Sequence[RecordedRound]:
    """Return the rounds of a run from the first to the last that left anything.

    Args:
        directory: a run that was verified.

    Raises:
        DamagedRunError: a file is missing or damaged.
        JournalError: the ledger is damaged.
    """
    rows = {row["round"]: row for row in directory.read_rounds()}
    releases = {one.round: one for one in read_releases(directory.releases)}
    charges: dict[int, dict[int, Charge]] = {}
    journal = FileJournal(directory.ledger)
    for client in journal.clients():
        for charge in journal.history(client):
            charges.setdefault(charge.round_number, {})[client] = charge
    last = max([0, *rows, *releases, *charges])
    return [
        RecordedRound(n, rows.get(n), releases.get(n), charges.get(n, {}))
        for n in range(1, last + 1)
    ]
