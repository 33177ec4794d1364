"""The durable privacy ledger: a hash-chained file with one record per client and round.

A record is on disk before its client releases anything in that round. Each client has its own
chain, so clients may write from several processes in any order and the same experiment still gives
the same records. A record is a line of JSON:

    {"client": 3, "round": 5, "request": digest of everything that the reply depends on,
     "steps": 5, "ledger": [{"event": EVENT, "count": n}], "previous": HASH, "hash": HASH}

`ledger` holds the releases charged against the adversary for which the client's ε is claimed. If
that adversary sees only sums, the record has a second ledger of the same form, `against_server`,
before `previous`. It holds the releases charged against a server that sees the client's upload.

`hash` is the SHA-256 of the record without it, as JSON with sorted keys and no spaces; `previous`
is the hash of the client's previous record, or 64 zeros.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from fedsim.accountant.events import Event
from fedsim.accountant.ledger.privacy_ledger import PrivacyLedger, records_of
from fedsim.core.durable import GENESIS, append, exclusive
from fedsim.core.errors import FedsimError, os_error_text

_COMPACT = json.JSONEncoder(separators=(",", ":"))
_SORTED = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


class JournalError(FedsimError, ValueError):
    """Raised for a durable ledger that is damaged or was changed; the message names the record."""


class JournalWriteError(JournalError):
    """Raised if a charge cannot be written to disk, so that nothing may be released."""


@dataclass(frozen=True)
class Charge:
    """The releases that one client charges to its privacy account in one round.

    Attributes:
        client: the client's number.
        round_number: the number of the round.
        request: digest of everything on which the client's reply depends.
        steps: number of training steps that the charge covers. It may differ from the sum of the
            counts: all batches of an epoch are charged when the epoch starts.
        ledger: the releases charged against the adversary for which the client's ε is claimed.
        previous: hash of the client's previous record; 64 zeros (`GENESIS`) for the first record.
        against_server: the releases charged against a server that sees the client's upload. It is
            None if `ledger` is already against such a server, or if no noise hides the upload from
            the server.
    """

    client: int
    round_number: int
    request: str
    steps: int
    ledger: PrivacyLedger
    previous: str
    against_server: PrivacyLedger | None = None

    @property
    def hash(self) -> str:
        """SHA-256 of the record in hexadecimal; it chains the client's next record to this one."""
        return self._hash_and_line[0]

    def to_line(self) -> str:
        """Return the record as one line of JSON."""
        return self._hash_and_line[1]

    @cached_property
    def _hash_and_line(self) -> tuple[str, str]:
        request, previous = _COMPACT.encode(self.request), _COMPACT.encode(self.previous)
        records, sorted_records = _json_of(self.ledger.entries)
        other = sorted_other = ""
        if self.against_server is not None:
            written, in_order = _json_of(self.against_server.entries)
            other, sorted_other = f'"against_server":{written},', f'"against_server":{in_order},'
        text = (
            f'{{{sorted_other}"client":{self.client},"ledger":{sorted_records},'
            f'"previous":{previous},"request":{request},"round":{self.round_number},'
            f'"steps":{self.steps}}}'
        )
        digest = hashlib.sha256(text.encode()).hexdigest()
        line = (
            f'{{"client":{self.client},"round":{self.round_number},"request":{request},'
            f'"steps":{self.steps},"ledger":{records},{other}"previous":{previous},'
            f'"hash":"{digest}"}}\n'
        )
        return digest, line

    @classmethod
    def from_line(cls, line: str, *, where: str) -> Self:
        """Return the charge that a line of the ledger records, after checking its hash.

        Args:
            line: one line of JSON with its line feed, as `to_line` wrote it.
            where: file and line number of the line, for error messages.

        Raises:
            JournalError: the line is not a record, or the hash does not fit the content.
        """
        try:
            fields: dict[str, Any] = json.loads(line)
            charge = cls(
                client=fields["client"],
                round_number=fields["round"],
                request=fields["request"],
                steps=fields["steps"],
                ledger=_ledger_of(fields["ledger"]),
                previous=fields["previous"],
                against_server=_ledger_of(fields["against_server"])
                if "against_server" in fields
                else None,
            )
            declared = fields["hash"]
            charge._check_types()
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise JournalError(f"{where}: not a ledger record: {error!r}") from error
        if charge.hash != declared or charge.to_line() != line:
            raise JournalError(f"{where}: the record was changed after it was written")
        return charge

    def _check_types(self) -> None:
        """Check the types of the fields, which JSON does not.

        Raises:
            TypeError: a field has another type.
        """
        numbers, texts = (self.client, self.round_number, self.steps), (self.request, self.previous)
        if any(type(n) is not int for n in numbers) or any(type(t) is not str for t in texts):
            raise TypeError("client, round and steps must be whole numbers, hashes must be text")


@lru_cache(maxsize=1024)
def _json_of(entries: tuple[tuple[Event, int], ...]) -> tuple[str, str]:
    """Return the records of a ledger as JSON, with keys as written and with sorted keys.

    Most clients of a federation have equal charges, so the text is made once for many records.
    """
    content = records_of(entries)
    return _COMPACT.encode(content), _SORTED.encode(content)


def _ledger_of(records: object) -> PrivacyLedger:
    """Return the ledger of a record's JSON; equal ledgers are read once, by their text."""
    return PrivacyLedger.from_text(_COMPACT.encode(records))


def total_of(charges: Iterable[Charge], before: PrivacyLedger | None = None) -> PrivacyLedger:
    """Return the sum of a client's charges as one new ledger.

    The ledger is against the adversary for which the client's ε is claimed.

    Args:
        charges: the charges, oldest first.
        before: ledger of the client's earlier charges; None if there are none.
    """
    total = PrivacyLedger() if before is None else PrivacyLedger().merge(before)
    for charge in charges:
        total.merge(charge.ledger)
    return total


def total_against_server(charges: Iterable[Charge]) -> PrivacyLedger | None:
    """Return the sum of a client's charges against the server as one ledger.

    The result is None if no charge has a ledger against the server.

    Raises:
        JournalError: some charges have a ledger against the server and others do not.
    """
    known = list(charges)
    lacking = [charge for charge in known if charge.against_server is None]
    if len(lacking) == len(known):
        return None
    if lacking:
        raise JournalError(
            f"client {lacking[0].client}: round {lacking[0].round_number} has no charge against "
            "the server, and another round has one: the records are of two trust models"
        )
    total = PrivacyLedger()
    for charge in known:
        total.merge(charge.against_server or PrivacyLedger())
    return total


class Journal(Protocol):
    """Interface of a durable ledger, to which clients write each charge before its release."""

    def history(self, client: int, *, after: int = 0) -> tuple[Charge, ...]:
        """Return the charges of a client, oldest first, but skip the first `after` charges."""
        ...

    def append_all(self, charges: Sequence[Charge]) -> None:
        """Write charges in order; when this returns, all of them survive a crash."""
        ...


@dataclass
class _Chain:
    """The positions of one client's records in the file, and the hash of the last one."""

    head: str = GENESIS
    places: "array[int]" = field(default_factory=lambda: array("q"))


class FileJournal:
    """A durable ledger in one append-only file, shared by any number of processes of one machine.

    Memory holds only eight bytes for each record, and each client's last hash. Charges are read
    from the file on request.

    Guarantee: when `append` returns, the new record is on disk. If a crash cut a record short, the
    release never happened; the next `append` removes that record.

    Raises:
        JournalError: a record that is read was changed, or does not continue its client's chain.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._name = path, str(path)
        self._offset = 0
        self._chains: dict[int, _Chain] = {}
        self._write_error: str | None = None

    def history(self, client: int, *, after: int = 0) -> tuple[Charge, ...]:
        """Return the charges of a client, oldest first, but skip the first `after` charges."""
        self._refresh()
        chain = self._chains.get(client)
        if chain is None or len(chain.places) <= after:
            return ()
        charges = []
        with self._path.open("rb") as file:
            for place in chain.places[after:]:
                file.seek(place)
                where = f"{self._path.name}, byte {place}"
                charges.append(Charge.from_line(file.readline().decode(), where=where))
        return tuple(charges)

    def histories(self) -> dict[int, list[Charge]]:
        """Return the charges of each client, oldest first; reads the file once, from its start."""
        histories: dict[int, list[Charge]] = {}
        if self._path.is_file():
            with self._path.open("rb") as file:
                for charge in FileJournal(self._path)._new_charges(file):
                    histories.setdefault(charge.client, []).append(charge)
        return dict(sorted(histories.items()))

    def head(self, client: int) -> str:
        """Return the hash of a client's last record.

        The client's next record has this hash as `previous`.
        """
        self._refresh()
        chain = self._chains.get(client)
        return GENESIS if chain is None else chain.head

    def clients(self) -> tuple[int, ...]:
        """Return the numbers of all clients with a charge, ascending."""
        self._refresh()
        return tuple(sorted(self._chains))

    def append(self, charge: Charge) -> None:
        """Write a charge and force it to disk before returning.

        Raises:
            JournalError: the charge does not continue its client's chain.
        """
        self.append_all([charge])

    def append_all(self, charges: Sequence[Charge]) -> None:
        """Write charges in order and force them to disk with a single wait for all clients.

        No release of these charges may happen before this returns. After a crash some of the
        records may be on disk and others not; the records on disk count as spent.

        Raises:
            JournalError: a charge does not continue its client's chain; nothing was written.
            JournalWriteError: writing fails now or failed earlier. After a failure it is unknown
                which records are on disk, so only a new process may continue.
        """
        if not charges:
            return
        if self._write_error is not None:
            raise JournalWriteError(self._write_error)
        try:
            self._write(charges)
        except OSError as error:
            self._write_error = f"{self._path.name}: {os_error_text(error)}"
            raise JournalWriteError(self._write_error) from error

    def _write(self, charges: Sequence[Charge]) -> None:
        lines = [charge.to_line().encode() for charge in charges]
        with self._path.open("a+b") as file, exclusive(file):
            self._catch_up(file)
            heads: dict[int, str] = {}
            for charge in charges:
                self._check(charge, heads.get(charge.client), where="new record")
                heads[charge.client] = charge.hash
            append(file, b"".join(lines), at=self._offset)
        for charge, line in zip(charges, lines, strict=True):
            self._remember(charge, len(line))

    def _refresh(self) -> None:
        try:
            size = os.stat(self._name).st_size  # a client asks each round, and `Path.stat` is slow
        except FileNotFoundError:
            return
        if size != self._offset:
            with self._path.open("rb") as file:
                self._catch_up(file)

    def _catch_up(self, file: BinaryIO) -> None:
        """Read the complete records that were added since the last read."""
        for _ in self._new_charges(file):
            pass

    def _new_charges(self, file: BinaryIO) -> Iterator[Charge]:
        """Yield the complete records that were added since the last read, and remember them."""
        if file.seek(0, os.SEEK_END) < self._offset:
            raise JournalError(f"{self._path.name} was shortened: records are missing")
        file.seek(self._offset)
        for line in iter(file.readline, b""):
            if not line.endswith(b"\n"):
                return
            where = f"{self._path.name}, byte {self._offset}"
            charge = Charge.from_line(line.decode(errors="replace"), where=where)
            self._check(charge, None, where=where)
            self._remember(charge, len(line))
            yield charge

    def _check(self, charge: Charge, head: str | None, *, where: str) -> None:
        """Check that a charge continues its client's chain, or the hash `head` if it is given."""
        chain = self._chains.get(charge.client)
        expected = head or (GENESIS if chain is None else chain.head)
        if charge.previous != expected:
            raise JournalError(
                f"{where}: the record of client {charge.client}, round {charge.round_number} "
                "does not continue that client's chain"
            )

    def _remember(self, charge: Charge, length: int) -> None:
        chain = self._chains.get(charge.client)
        if chain is None:
            chain = self._chains[charge.client] = _Chain()
        chain.head = charge.hash
        chain.places.append(self._offset)
        self._offset += length
