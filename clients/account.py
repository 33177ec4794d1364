"""Privacy account of a client, which is charged in the ledger on disk before a release.

The account holds the client's spend, the last round that was charged, and a digest of the request
of that round. It follows two rules:

- Spend first, release second: training starts only after the charge is in the ledger on disk. A
  crash can leave a charge without an update, never the reverse.
- A repeated answer has the same bits, or is charged again. Seeded noise depends only on (seed,
  client, round). So two different answers in one round would carry the same noise, which cancels in
  their difference. A charge therefore holds a digest of everything that the reply depends on. With
  the same digest a round is repeated at no cost, and the reply is bitwise equal. With another
  digest the request is refused. Noise from the operating system never repeats, so a reply with such
  noise is always a new release and is charged.

The ledger is public, and with a plain hash of private examples an adversary could test guesses. The
digest is therefore a keyed hash (BLAKE2b as a MAC), with a key from the seed and the client:

- Without the seed, the digest is a pseudorandom function's value and reveals nothing of the data.
- An adversary that knows the seed can compute seeded noise and subtract it. So ε does not hold
  against such an adversary, with or without this digest.
- With noise from the operating system the seed need not be secret, so the digest leaves out the
  examples.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.ledger.journal import Charge, Journal, JournalWriteError
from fedsim.clients.faults import ClientFailureError
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.core.streams import Purpose, stream_key
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import LEDGER_UNWRITABLE, NOISE_REUSE
from fedsim.protocol.noisy_sums import AdaptiveClipNorm


class ChargeRefusedError(ClientFailureError):
    """Error: the client's privacy account refuses a round. Nothing is charged or released."""


class NoiseReuseError(ChargeRefusedError):
    """Error: the request would reuse the noise of an earlier, different answer of the client."""

    code = NOISE_REUSE


class LedgerUnwritableError(ChargeRefusedError):
    """Error for a charge that cannot be written to the ledger on disk."""

    code = LEDGER_UNWRITABLE


class ClientBudgetExhaustedError(ChargeRefusedError):
    """Error for a client whose privacy budget does not allow another step."""


@dataclass(frozen=True)
class PrivacyAccount:
    """Privacy spend of a client, and the last request that was charged.

    Attributes:
        plan: the client's mechanism and budget.
        spend: the client's ledger, with all charges so far.
        last_round: number of the last round that was charged; 0 before the first charge.
        last_request: digest of everything on which the answer in `last_round` depends.
    """

    plan: PrivacyPlan
    spend: ClientSpend
    last_round: int = 0
    last_request: str = ""

    def propose(self, *, round_number: int, request: str, steps: int) -> Charge | None:
        """Return the charge for a client's round; None if the same request was already charged.

        The charge has the privacy events that the client's ε counts. With distributed trust it also
        has the events against a server that sees the uploads. Nothing is charged yet: the caller
        calls `Accounts.charge`, and only then releases anything. So charges of many clients can be
        written to disk together.

        Guarantee: only steps within the budget are charged. After the charge, `spend.round_steps`
        of the account is the number of steps that the client may take.

        Args:
            round_number: the round of the request.
            request: digest of everything on which the answer depends.
            steps: number of steps that the server requests.

        Raises:
            ClientBudgetExhaustedError: the budget does not allow even one more step.
            NoiseReuseError: the round is past, or was charged for another answer.
            ChargeRefusedError: correlated noise was charged for another number of planned steps.
        """
        again = round_number == self.last_round and request == self.last_request
        if again and not self.plan.secure_noise:
            return None
        self._refuse_noise_reuse(round_number)
        self._refuse_other_run(round_number)
        granted = self._granted_steps(steps)
        first, spend = self.spend.steps, self.spend
        against_server = self.plan.server_charges(first, granted)
        return Charge(
            spend.client,
            round_number,
            request,
            granted,
            PrivacyLedger.of(self.plan.charges(first, granted)),
            spend.head,
            None if against_server is None else PrivacyLedger.of(against_server),
        )

    def after(self, charges: Sequence[Charge]) -> Self:
        """Return the account after further charges, oldest first; there is at least one."""
        last = charges[-1]
        spend = self.spend.after(charges)
        return type(self)(self.plan, spend, last.round_number, last.request)

    def _refuse_noise_reuse(self, round_number: int) -> None:
        # Secure noise is never the same twice, so an old round is a new release, charged as one.
        if round_number > self.last_round or self.plan.secure_noise:
            return
        client = self.spend.client
        if round_number < self.last_round:
            raise NoiseReuseError(
                f"client {client} answered round {self.last_round} already and would reuse its "
                f"noise in round {round_number}: resume the run with its `out`, or set another seed"
            )
        raise NoiseReuseError(
            f"client {client} was charged in round {round_number} for an answer with another "
            "global model, block, data, plug-in, setting, version of fedsim, torch or numpy, or "
            "device, and would reuse its noise: resume with what the run began with, or start a "
            "new run with another seed"
        )

    def _refuse_other_run(self, round_number: int) -> None:
        """Check that the client's correlated noise was charged for the run that is planned now.

        Raises:
            ChargeRefusedError: the first charge differs from the charge of the plan, or the round
                is too early after the client's last one.
        """
        step, spend = self.plan.release, self.spend
        if step.correlation is None or spend.steps == 0:
            return
        if list(spend.ledger.entries) != step.charges(0, self.plan.planned_steps):
            raise ChargeRefusedError(
                f"client {spend.client} was charged for all steps of a run with correlated noise, "
                f"and now {self.plan.planned_steps} other ones are planned: resume with the rounds "
                "and settings that the run began with, or start a new run with another seed"
            )
        apart = step.correlation.rounds_apart
        if round_number < self.last_round + apart:
            raise ChargeRefusedError(
                f"client {spend.client} was in round {self.last_round} and is asked in round "
                f"{round_number}, and its noise is charged for rounds that are at least "
                f"{apart} apart (federation.participation.rounds_apart)"
            )

    def _granted_steps(self, steps: int) -> int:
        """Return how many of the requested steps the budget affords, at least one."""
        if self.plan.affordable_steps is None and self.plan.release.correlation is None:
            return steps
        granted = min(steps, self.plan.steps_to_take - self.spend.steps)
        if granted <= 0 and self.plan.release.correlation is not None:
            raise ClientBudgetExhaustedError(
                f"correlated noise was charged for {self.plan.steps_to_take} steps, the whole "
                f"plan, and {self.spend.steps} are taken"
            )
        if granted <= 0:
            raise ClientBudgetExhaustedError(
                f"target ε = {self.plan.target_epsilon:g} at δ = {self.plan.delta:g} affords "
                f"{self.plan.affordable_steps} steps, and {self.spend.steps} are taken"
            )
        return granted


class Accounts:
    """Privacy accounts of the clients of a process, with all charges in the ledger on disk.

    An account stays in memory. A charge that another process wrote, or that was written before an
    error, is read from the ledger when the client's account is asked for.

    Args:
        journal: the ledger on disk; None keeps the accounts in memory only.
    """

    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal
        self._known: dict[int, PrivacyAccount] = {}

    def of(self, client: int, plan: PrivacyPlan) -> PrivacyAccount:
        """Return the current account of a client.

        Args:
            client: number of the client.
            plan: the client's mechanism and budget.

        Raises:
            JournalError: the ledger on disk was damaged or changed.
        """
        account = self._known.get(client)
        if account is None:
            account = PrivacyAccount(plan, plan.spend_of(client))
        elif account.plan is not plan:
            account = replace(account, plan=plan, spend=plan.spend_of(client, account.spend))
        if self.journal is not None:
            missed = self.journal.history(client, after=account.spend.rounds)
            account = account.after(missed) if missed else account
        self._known[client] = account
        return account

    def charge(self, proposed: Sequence[tuple[PrivacyAccount, Charge]]) -> list[PrivacyAccount]:
        """Write charges to the ledger on disk, and return the accounts after the charges.

        Guarantee: when this method returns, all charges are on disk, if there is a ledger.

        Args:
            proposed: accounts of different clients, each with the charge that it proposed.

        Raises:
            LedgerUnwritableError: the disk refuses the write.
            JournalError: a charge does not continue its client's chain.
        """
        if self.journal is not None:
            try:
                self.journal.append_all([charge for _, charge in proposed])
            except JournalWriteError as error:
                raise LedgerUnwritableError(str(error)) from error
        charged = [account.after((charge,)) for account, charge in proposed]
        self._known.update((account.spend.client, account) for account in charged)
        return charged


_DIGEST_BYTES = 32


def request_digest(
    *,
    seed: int,
    client: int,
    block: tuple[int, ...],
    padded_rows: int | None,
    model: str,
    clip_norm: AdaptiveClipNorm | None,
    mechanism: str,
    conditions: str,
    data: bytes | None,
    sent: str = "",
    places: int | None = None,
) -> str:
    """Return the digest (64 hex digits) by which a charge identifies the request it paid for.

    Guarantee: equal digests of one client mean equal arguments, up to a collision of BLAKE2b-256.
    The arguments are everything on which the client's answer in a round depends.

    Args:
        seed: the experiment's seed.
        client: number of the client.
        block: numbers of the clients that are planned to train together, ascending.
        padded_rows: number of rows of each client in a padded batch of the block; None if a client
            has as many rows as when it trains alone.
        model: digest of the request's global model.
        clip_norm: adaptive clip norm in the request; None if the request has none.
        mechanism: the client's mechanism as text, with noise, clipping and sampling.
        conditions: digest of settings, sources of plug-ins, versions and device.
        data: digest of the client's examples; None if the result must not depend on the examples.
        sent: digests of the arrays that the algorithm sends beside the model; "" if there are none.
        places: number of slots (groups of rows of one client) in a padded batch, if any client may
            use any slot; None if each client has a slot of its own.
    """
    own = (
        "" if data is None else data.hex(),
        *([sent] if sent else []),
        *([f"{places} places"] if places else []),
    )
    key = stream_key(seed, Purpose.REQUEST_DIGEST, client=client)
    shared = _shared_text(block, repr(padded_rows), model, repr(clip_norm), mechanism, conditions)
    return hashlib.blake2b(shared + _joined(own), digest_size=_DIGEST_BYTES, key=key).hexdigest()


@lru_cache(maxsize=8)
def _shared_text(block: tuple[int, ...], *parts: str) -> bytes:
    """Return the text that the members of a block have in common, cached for them."""
    return _joined((",".join(map(str, block)), *parts))


def _joined(parts: Iterable[str]) -> bytes:
    return "".join([f"{len(part)}:{part}" for part in parts]).encode()
