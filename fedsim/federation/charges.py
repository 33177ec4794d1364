"""Reading of the clients' privacy spend from the ledger on disk, and charges made by the server.

The spend includes charges whose updates were lost. Clients usually charge themselves. If the server
draws clients in secret, a client that charged itself would show that it was drawn. The server then
charges every client for every round, and writes this to the ledger before it draws the noise.
"""

from collections.abc import Sequence

from flwr.app import RecordDict

from fedsim.accountant.ledger.journal import FileJournal, Journal, JournalWriteError
from fedsim.clients.account import ChargeRefusedError, PrivacyAccount, request_digest
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import FederationError

_RELEASES_PER_ROUND = 1  # a round is one release of a client, whatever local.steps is


class ServerCharges:
    """Object by which a server that draws clients in secret charges every client for every round.

    Guarantee: when `charge` returns, the charge of every client for the round is on disk. A round
    that is repeated with the same seeded noise, model and settings is not charged again, as its
    release is the same. A release with other noise is charged.

    Args:
        plans: the privacy plan of each client.
        journal: the ledger on disk; None keeps the charges in memory only.
        conditions: the digest of the settings, plug-in sources, versions and device of the run.
        seed: the experiment's seed.
    """

    def __init__(
        self, plans: Sequence[PrivacyPlan], journal: Journal | None, *, conditions: str, seed: int
    ) -> None:
        self._journal, self._conditions, self._seed = journal, conditions, seed
        self._states = [RecordDict() for _ in plans]
        self._accounts = [
            PrivacyAccount.restore(state, plan, client=client, journal=journal)
            for client, (plan, state) in enumerate(zip(plans, self._states, strict=True))
        ]

    def charge(self, round_number: int, model: str) -> Sequence[ClientSpend]:
        """Charge every client for a round; return each client's spend, in the order of clients.

        Args:
            round_number: the round.
            model: the digest of the global model from which the round starts.

        Raises:
            FederationError: the ledger cannot be written, or a client was charged for another
                release of this round; nothing may be released.
        """
        try:
            charges = [
                account.propose(
                    round_number=round_number,
                    request=self._request(client, account.plan, model),
                    steps=_RELEASES_PER_ROUND,
                )
                for client, account in enumerate(self._accounts)
            ]
            if self._journal is not None:
                self._journal.append_all([charge for charge in charges if charge is not None])
        except (ChargeRefusedError, JournalWriteError) as error:
            raise FederationError(
                f"round {round_number}: no client was charged: {error}"
            ) from error
        for client, charge in enumerate(charges):
            if charge is not None:
                account = self._accounts[client]
                self._accounts[client] = account.commit(charge, self._states[client])
        return [account.spend for account in self._accounts]

    def _request(self, client: int, plan: PrivacyPlan, model: str) -> str:
        """Return the digest of the release that a charge is for, which names no participant."""
        return request_digest(
            seed=self._seed,
            client=client,
            block=(),
            padded_rows=None,
            model=model,
            clip_norm=None,
            mechanism=plan.mechanism_text,
            conditions=self._conditions,
            data=None,
        )


class RecordedSpend:
    """Reader of the clients' privacy spend from the durable ledger; it parses each charge once.

    Args:
        plans: the privacy plan of every client.
        journal: the durable ledger of the run.
    """

    def __init__(self, plans: Sequence[PrivacyPlan], journal: FileJournal) -> None:
        self._journal = journal
        self._plans = plans
        self._spends: dict[int, ClientSpend] = {}

    def of(self, client: int) -> ClientSpend:
        """Return the privacy spend of a client according to all charges in the ledger so far."""
        before = self._spends.get(client) or self._plans[client].initial_spend(client)
        history = self._journal.history(client, after=before.rounds)
        if not history:
            return before
        self._spends[client] = before.after(history)
        return self._spends[client]
