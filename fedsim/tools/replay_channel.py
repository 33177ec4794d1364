"""The grid of a replay, which trains again only the clients that trained in the recorded run.

For all other clients, the grid repeats the recorded failure or withdrawal. Which clients failed
may have depended on the machine (a worker that died, an interrupt), so it is taken from the
records.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import Charge
from fedsim.federation.federation import Federation
from fedsim.protocol.channel import ClientError, MessageChannel, TrainAnswer
from fedsim.protocol.messages import SealedReply, TrainReply, TrainRequest, Withdrawal
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.runs.records import Releases
from fedsim.server.round_report import RoundRow
from fedsim.simulation.local_engine import LocalGrid
from fedsim.simulation.virtual_grid import FIRST_NODE


@dataclass(frozen=True)
class RecordedRound:
    """The records of one round of a run.

    Attributes:
        number: number of the round, from 1.
        row: the round's line of `rounds.jsonl`; None if the round was interrupted.
        releases: the round's line of `releases.jsonl`; None if the round was interrupted.
        charges: charge of each client that was charged in the round, by client number.
    """

    number: int
    row: RoundRow | None = None
    releases: Releases | None = None
    charges: Mapping[int, Charge] = field(default_factory=dict)

    @property
    def uploads(self) -> Mapping[int, str]:
        """Tags (keyed checksums) of the round's unencrypted uploads, by client number."""
        return {} if self.releases is None else self.releases.uploads

    @cached_property
    def participants(self) -> frozenset[int]:
        """Numbers of the clients whose updates are in the average of the round."""
        return frozenset(() if self.row is None else self.row["participants"])

    @cached_property
    def asked(self) -> frozenset[int]:
        """Numbers of the clients that trained: with a charge, an upload or an averaged update."""
        return frozenset(self.charges) | frozenset(self.uploads) | self.participants

    @cached_property
    def _answers(self) -> Mapping[int, TrainAnswer]:
        if self.row is None:
            return {}
        failed = {row["client"]: ClientError(str(row["reason"])) for row in self.row["failed"]}
        reasons = {row["client"]: str(row["reason"]) for row in self.row["withdrawn"]}
        return failed | {client: Withdrawal(client, text) for client, text in reasons.items()}

    def answer(self, client: int) -> TrainAnswer:
        """Return the recorded failure or withdrawal of a client without a recorded release."""
        return self._answers.get(client, ClientError("nothing of this client was recorded"))


def read_recorded(directory: RunDirectory) -> Sequence[RecordedRound]:
    """Return the recorded rounds of a run, from round 1 to the last round with any record.

    Args:
        directory: directory of a run that passed verification.

    Raises:
        DamagedRunError: a file is missing or damaged.
        JournalError: the ledger is damaged.
    """
    files, charges = RunFiles(directory), dict[int, dict[int, Charge]]()
    rows = {row["round"]: row for row in files.rounds}
    releases = {release.round: release for release in files.releases}
    for client, history in files.charges.items():
        for charge in history:
            charges.setdefault(charge.round_number, {})[client] = charge
    last = max([0, *rows, *releases, *charges])
    return [
        RecordedRound(n, rows.get(n), releases.get(n), charges.get(n, {}))
        for n in range(1, last + 1)
    ]


@dataclass
class MemoryJournal:
    """A ledger in memory that holds the charges of a replay.

    Attributes:
        charges: the charges of each client, oldest first.
    """

    charges: dict[int, list[Charge]] = field(default_factory=dict)

    def history(self, client: int, *, after: int = 0) -> tuple[Charge, ...]:
        """Return the charges of a client, oldest first, without the first `after` charges."""
        return tuple(self.charges.get(client, [])[after:])

    def append_all(self, charges: Sequence[Charge]) -> None:
        """Append charges to the ledger in memory."""
        for charge in charges:
            self.charges.setdefault(charge.client, []).append(charge)

    def in_round(self, round_number: int) -> dict[int, Charge]:
        """Return the charge of each client in a round, by client number."""
        last = {client: charges[-1] for client, charges in self.charges.items()}
        return {k: charge for k, charge in last.items() if charge.round_number == round_number}


class ReplayGrid(LocalGrid):
    """A local Flower grid that sends training requests only to the clients that trained in the run.

    Args:
        client_app: the ClientApp of every node.
        num_clients: number of nodes.
        federation: the federation of the replay.
        rounds: the recorded rounds, from round 1.
        failures: mapping for the errors of the current round's clients that train again, by client
            number; `train` clears and fills it.
        options: the other arguments of `LocalGrid`.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        *,
        federation: Federation,
        rounds: Sequence[RecordedRound],
        failures: dict[int, str],
        **options: Any,
    ) -> None:
        super().__init__(client_app, num_clients, **options)
        self._rounds, self._failures = rounds, failures
        self._reply_type = TrainReply if federation.secure is None else SealedReply
        # In secret participation the record names no participants, so every drawn client trains.
        self._is_secret = federation.plan.participation.is_secret

    def direct_channel(self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return this grid, which is the channel of its training requests."""
        return self

    def train(
        self, requests: Mapping[int, TrainRequest], *, timeout: float | None
    ) -> Iterator[tuple[int, TrainAnswer]]:
        """Yield (node id, answer) for each request: a new answer, or the recorded failure."""
        self._failures.clear()
        if not requests:
            return
        recorded = self._rounds[next(iter(requests.values())).round_number - 1]
        asked = {
            node: request
            for node, request in requests.items()
            if node - FIRST_NODE in recorded.asked
        }
        for node in requests.keys() - asked.keys():
            yield node, recorded.answer(node - FIRST_NODE)
        channel = super().direct_channel() or MessageChannel(self, self._reply_type)
        for node, answer in channel.train(asked, timeout=timeout):
            client = node - FIRST_NODE
            if isinstance(answer, ClientError):
                self._failures[client] = answer.reason
            released = recorded.uploads if isinstance(answer, TrainReply) else ()
            came = client in (released or recorded.participants) or self._is_secret
            yield node, answer if came else recorded.answer(client)
