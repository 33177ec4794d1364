"""The recorded clients train again; clients without a recorded release answer as they did.

Who failed or withdrew may have depended on the machine: a worker that died, an interrupt. So that
is taken from the record. What a client computes does not depend on who else was there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import Charge
from fedsim.protocol.channel import ClientChannel, ClientError, MessageChannel, TrainAnswer
from fedsim.protocol.messages import SealedReply, TrainReply, TrainRequest, Withdrawal
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.runs.records import Releases
from fedsim.server.round_report import RoundRow
from fedsim.simulation.local_engine import LocalGrid
from fedsim.simulation.virtual_grid import FIRST_NODE


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
    files, charges = RunFiles(directory), dict[int, dict[int, Charge]]()
    rows = {row["round"]: row for row in files.rounds}
    releases = {one.round: one for one in files.releases}
    for client in files.journal.clients():
        for charge in files.journal.history(client):
            charges.setdefault(charge.round_number, {})[client] = charge
    last = max([0, *rows, *releases, *charges])
    return [
        RecordedRound(n, rows.get(n), releases.get(n), charges.get(n, {}))
        for n in range(1, last + 1)
    ]


NOT_RECORDED = "nothing of this client was recorded"


@dataclass
class MemoryJournal:
    """A ledger in memory: what clients are charged in a replay.

    Attributes:
        charges: of each client, oldest first.
    """

    charges: dict[int, list[Charge]] = field(default_factory=dict)

    def history(self, client: int, *, after: int = 0) -> tuple[Charge, ...]:
        """Return the charges of a client, oldest first, without the first `after` of them."""
        return tuple(self.charges.get(client, [])[after:])

    def append(self, charge: Charge) -> None:
        """Keep a charge."""
        self.append_all([charge])

    def append_all(self, charges: Sequence[Charge]) -> None:
        """Keep charges."""
        for charge in charges:
            self.charges.setdefault(charge.client, []).append(charge)

    def in_round(self, round_number: int) -> dict[int, Charge]:
        """Return the charges of a round, by client."""
        last = {client: charges[-1] for client, charges in self.charges.items()}
        return {k: charge for k, charge in last.items() if charge.round_number == round_number}


@dataclass(frozen=True)
class ReplayChannel:
    """A channel that asks the recorded clients alone.

    Attributes:
        channel: reaches all clients.
        rounds: the recorded rounds, from the first.
        failures: receives what clients that trained again raised, by client.
        is_secret: whether the record names no participant, so that every drawn client trains.
    """

    channel: ClientChannel
    rounds: Sequence[RecordedRound]
    failures: dict[int, str]
    is_secret: bool = False

    def train(
        self, requests: Mapping[int, TrainRequest], *, timeout: float | None
    ) -> Iterator[tuple[int, TrainAnswer]]:
        """Yield node and answer of each client (see `ClientChannel`)."""
        self.failures.clear()
        if not requests:
            return
        recorded = self.rounds[next(iter(requests.values())).round_number - 1]
        asked = {node: one for node, one in requests.items() if node - FIRST_NODE in recorded.asked}
        for node in requests.keys() - asked.keys():
            yield node, _recorded_answer(recorded, node - FIRST_NODE)
        for node, answer in self.channel.train(asked, timeout=timeout):
            client = node - FIRST_NODE
            if isinstance(answer, ClientError):
                self.failures[client] = answer.reason
            released = recorded.uploads if isinstance(answer, TrainReply) else ()
            came = client in (released or recorded.participants) or self.is_secret
            yield node, answer if came else _recorded_answer(recorded, client)


def _recorded_answer(recorded: RecordedRound, client: int) -> TrainAnswer:
    """Return the answer of a client whose release was not recorded."""
    if client in recorded.withdrawals:
        return Withdrawal(client, recorded.withdrawals[client])
    return ClientError(recorded.failures.get(client, NOT_RECORDED))


class ReplayGrid(LocalGrid):
    """A local grid with a `ReplayChannel`.

    Args:
        client_app: the app of every node.
        num_clients: number of nodes.
        run_id: Flower's id of the run.
        rounds: the recorded rounds.
        failures: see `ReplayChannel`.
        is_secure: whether updates are summed in secret.
        is_secret: see `ReplayChannel`.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        *,
        run_id: int = 1,
        rounds: Sequence[RecordedRound],
        failures: dict[int, str],
        is_secure: bool,
        is_secret: bool = False,
    ) -> None:
        super().__init__(client_app, num_clients, run_id=run_id)
        self._rounds, self._failures = rounds, failures
        self._reply_type = SealedReply if is_secure else TrainReply
        self._is_secret = is_secret

    def direct_channel(self) -> ReplayChannel:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the channel that asks the recorded clients."""
        channel = super().direct_channel() or MessageChannel(self, self._reply_type)
        return ReplayChannel(channel, self._rounds, self._failures, self._is_secret)
