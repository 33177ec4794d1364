"""A client's privacy account: kept in Flower's `Context.state`, charged before any release.

The account holds the client's ledger and the position of its random streams (the last round it was
charged for, and the model it trained from in that round). It follows two rules:

- Spend first, release second: `charge` writes to the durable journal, then to the state; only then
  does training start. A crash can leave a charge without an update, never the reverse.
- A round is charged once. Noise is keyed by (seed, client, round), so a second, different answer
  for the same round would reuse its noise; that request is refused. The same request again gives
  the same answer, bit for bit, and costs nothing more. Secure noise is not keyed: with it every
  answer is a release of its own, and is charged.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from flwr.app import ConfigRecord, RecordDict

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.ledger.journal import GENESIS, Charge, Journal
from fedsim.clients.budget.plan import PrivacyPlan
from fedsim.clients.failure_text import ClientFailureError
from fedsim.protocol.messages import PrivacyStatement, record_of
from fedsim.protocol.records import config_record

STATE = "privacy-account"


class ChargeRefusedError(ClientFailureError):
    """The account does not allow this round; nothing was charged and nothing may be released."""


class ClientBudgetExhaustedError(ChargeRefusedError):
    """The budget affords no further step."""


@dataclass(frozen=True)
class PrivacyAccount:
    """What a client has spent so far.

    Attributes:
        client: its number.
        spent: its ledger as JSON.
        rounds: rounds it was charged for.
        steps: steps it was charged for.
        round_steps: those of the last round.
        last_round: the last round it was charged for.
        last_request: digest of the model it trained from in that round.
        head: hash of its last record in the journal.
    """

    client: int
    spent: str = "[]"  # the ledger as JSON
    rounds: int = 0
    steps: int = 0
    round_steps: int = 0
    last_round: int = 0
    last_request: str = ""
    head: str = GENESIS

    @property
    def ledger(self) -> PrivacyLedger:
        """Everything that was charged, run-length encoded."""
        return PrivacyLedger.from_text(self.spent)

    @classmethod
    def restore(cls, state: RecordDict, *, client: int, journal: Journal | None) -> Self:
        """Return the account of `client` as it stands.

        The journal is the truth where there is one: a state that was lost in a crash, or thrown
        away by an engine after an error, catches up with it.
        """
        account = cls._from_state(state, client)
        missed = () if journal is None else journal.history(client, after=account.rounds)
        for charge in missed:
            account = account._after(charge)
        return account

    def save(self, state: RecordDict) -> None:
        """Write the account into the client's `Context.state`."""
        state[STATE] = config_record(
            {
                "client": self.client,
                "ledger": self.spent,
                "rounds": self.rounds,
                "steps": self.steps,
                "round-steps": self.round_steps,
                "last-round": self.last_round,
                "last-request": self.last_request,
                "head": self.head,
            }
        )

    def charge(
        self,
        plan: PrivacyPlan,
        *,
        round_number: int,
        request: str,
        steps: int,
        state: RecordDict,
        journal: Journal | None,
    ) -> Self:
        """Charge up to `steps` steps of `plan` for one round and return the account after it.

        Guarantee: for each of the steps the budget is asked first; those that it affords are
        charged, and `round_steps` of the result says how many may be taken.

        Args:
            plan: the mechanism and the budget.
            round_number: the round that is asked for.
            request: digest of the model that the client is asked to train from.
            steps: steps that the server wants.
            state: the client's `Context.state`.
            journal: the durable ledger; None keeps the account in the state only.

        Raises:
            ClientBudgetExhaustedError: not even one more step fits.
            ChargeRefusedError: the round was answered for another model, or lies in the past.
        """
        charge = self.propose(plan, round_number=round_number, request=request, steps=steps)
        if charge is None:
            return self
        if journal is not None:
            journal.append(charge)
        return self.commit(charge, state)

    def propose(
        self, plan: PrivacyPlan, *, round_number: int, request: str, steps: int
    ) -> Charge | None:
        """Return what `charge` would write, None where the request was charged for before.

        Nothing is charged yet: whoever releases anything must first write it to the journal and
        then `commit` it. That way the charges of many clients can reach the disk together.

        Raises:
            ChargeRefusedError: as `charge`.
        """
        again = round_number == self.last_round and request == self.last_request
        if again and not plan.secure_noise:
            return None
        self._refuse_answered(plan, round_number)
        granted = self._granted(plan, steps)
        spent = PrivacyLedger()
        for event, count in plan.step.charges(self.steps, granted):
            spent.record(event, count)
        return Charge(self.client, round_number, request, granted, spent, self.head)

    def commit(self, charge: Charge, state: RecordDict) -> Self:
        """Return the account after a charge that the journal has, written to the state."""
        account = self._after(charge)
        account.save(state)
        return account

    def statement(self, plan: PrivacyPlan) -> PrivacyStatement:
        """Return what the client says of its account with an upload."""
        return PrivacyStatement(
            client=self.client,
            examples=plan.examples,
            delta=plan.delta,
            noise_multiplier=plan.step.noise_multiplier,
            sampling_rate=plan.step.sampling.sampling_rate,
            target_epsilon=plan.target_epsilon,
            rounds=self.rounds,
            steps=self.steps,
            round_steps=self.round_steps,
            ledger=self.ledger,
            head=self.head,
        )

    @classmethod
    def _from_state(cls, state: RecordDict, client: int) -> Self:
        record = record_of(state, STATE, ConfigRecord)
        if record is None:
            return cls(client)
        fields: dict[str, Any] = dict(record.items())
        return cls(
            client=client,
            spent=fields["ledger"],
            rounds=fields["rounds"],
            steps=fields["steps"],
            round_steps=fields["round-steps"],
            last_round=fields["last-round"],
            last_request=fields["last-request"],
            head=fields["head"],
        )

    def _after(self, charge: Charge) -> Self:
        return replace(
            self,
            spent=_added(self.spent, charge.ledger.to_text()),
            rounds=self.rounds + 1,
            steps=self.steps + charge.steps,
            round_steps=charge.steps,
            last_round=charge.round_number,
            last_request=charge.request,
            head=charge.hash,
        )

    def _refuse_answered(self, plan: PrivacyPlan, round_number: int) -> None:
        # Secure noise is never the same twice, so an old round is a new release, charged as one.
        if round_number <= self.last_round and not plan.secure_noise:
            raise ChargeRefusedError(
                f"client {self.client} answered round {self.last_round} already and would reuse "
                f"its noise in round {round_number}"
            )

    def _granted(self, plan: PrivacyPlan, steps: int) -> int:
        """Return how many of the wanted steps the budget affords, at least one."""
        if plan.affordable_steps is None:
            return steps
        granted = min(steps, plan.affordable_steps - self.steps)
        if granted <= 0:
            raise ClientBudgetExhaustedError(
                f"target ε = {plan.target_epsilon:g} at δ = {plan.delta:g} affords "
                f"{plan.affordable_steps} steps, and {self.steps} are taken"
            )
        return granted


@lru_cache(maxsize=1024)
def _added(spent: str, charged: str) -> str:
    """Return a ledger with what was charged behind it, all as text; many clients spend the same."""
    return PrivacyLedger.from_text(spent).merge(PrivacyLedger.from_text(charged)).to_text()
