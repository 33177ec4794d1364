"""The privacy budget that a client has spent, as uploads and the summary of a run report it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flwr.app import ConfigRecord

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.ledger.journal import Charge, JournalError, total_against_server, total_of
from fedsim.core.limits import MAX_ROUNDS, MAX_STEPS
from fedsim.protocol.errors import ProtocolError


@dataclass(frozen=True)
class ClientSpend:
    """The privacy budget that one client has spent, and the noise and sampling that it paid for.

    All values are public under the client's adjacency. Anyone can recompute ε from the two ledgers.

    Attributes:
        client: the client's number.
        examples: the public number of the client's examples (exact or declared), from which the
            sampling rate is computed.
        delta: the δ of the client's guarantee.
        noise_multiplier: the noise multiplier z.
        sampling_rate: the expected share of the client's examples in a batch.
        rounds: the number of rounds for which the client was charged.
        steps: the number of steps for which the client was charged.
        round_steps: the number of steps of the last charge.
        ledger: all charged events, against the adversary for which the client's ε is claimed.
        head: the hash of the client's last record in the durable ledger.
        target_epsilon: the client's budget ε; None without a budget.
        against_server: all charged events against a server that sees the client's single uploads.
            It is None before the first charge. It is also None if `ledger` is already against such
            a server, or if no noise protects the uploads from the server.
    """

    client: int
    examples: int
    delta: float
    noise_multiplier: float
    sampling_rate: float
    rounds: int
    steps: int
    round_steps: int
    ledger: PrivacyLedger
    head: str
    target_epsilon: float | None = None
    against_server: PrivacyLedger | None = None

    def after(self, charges: Sequence[Charge]) -> Self:
        """Return the client's spend after further charges, which are given oldest first.

        Raises:
            JournalError: some charges have a ledger against the server and others do not.
        """
        if not charges:
            return self
        return self.changed(
            rounds=self.rounds + len(charges),
            steps=self.steps + sum(charge.steps for charge in charges),
            round_steps=charges[-1].steps,
            ledger=total_of(charges, self.ledger),
            head=charges[-1].hash,
            against_server=self._against_server_after(charges),
        )

    def changed(self, **changes: Any) -> Self:
        """Return a copy with some attributes changed, in a third of the time of `replace`."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self), **changes)
        return copied

    def _against_server_after(self, charges: Sequence[Charge]) -> PrivacyLedger | None:
        new, before = total_against_server(charges), self.against_server
        if self.rounds > 0 and (new is None) != (before is None):
            raise JournalError(
                f"client {self.client}: its records are of two trust models, with a charge against "
                "the server in some rounds only"
            )
        if new is None:
            return None
        return PrivacyLedger().merge(before or PrivacyLedger()).merge(new)

    def to_record(self) -> ConfigRecord:
        """Return the client's spend as a Flower record; fields that are None are left out."""
        return ConfigRecord(
            {
                name.replace("_", "-"): value.to_text() if name in _LEDGERS else value
                for name, value in vars(self).items()
                if value is not None
            }
        )

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Self:
        """Return the spend that a Flower record holds.

        Raises:
            ProtocolError: a field is missing or malformed, or is a number that no client can have.
        """
        try:
            fields = {name.replace("-", "_"): value for name, value in record.items()}
            spend = cls(**{name: _READERS[name](value) for name, value in fields.items()})
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"malformed record of a client's spend: {error!r}") from error
        if not 0.0 < spend.delta < 1.0:
            raise ProtocolError(f"a client's delta must be between 0 and 1, got {spend.delta!r}")
        ledgers = (spend.ledger, spend.against_server or PrivacyLedger())
        if any(count > _MOST_RELEASES for ledger in ledgers for _, count in ledger.entries):
            raise ProtocolError("a client's ledger has more releases than any client can make")
        return spend


_LEDGERS = ("ledger", "against_server")
_MOST_RELEASES = MAX_ROUNDS * MAX_STEPS
_READERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("client", "examples", "rounds", "steps", "round_steps"), int),
    **dict.fromkeys(("delta", "noise_multiplier", "sampling_rate", "target_epsilon"), float),
    **dict.fromkeys(_LEDGERS, PrivacyLedger.from_text),
    "head": str,
}
