"""What clients have spent by the durable ledger, including charges whose updates were lost."""

from collections.abc import Sequence

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.protocol.client_spend import ClientSpend


class RecordedSpend:
    """Reads the spend of clients from the ledger; a second read of a client reads new charges only.

    Args:
        plans: the plan of every client.
        journal: the durable ledger of the run.
    """

    def __init__(self, plans: Sequence[PrivacyPlan], journal: FileJournal) -> None:
        self._journal = journal
        self._plans = plans
        self._spends: dict[int, ClientSpend] = {}

    def clients(self) -> tuple[int, ...]:
        """Return the clients that were ever charged."""
        return self._journal.clients()

    def of(self, client: int) -> ClientSpend:
        """Return what a client has spent so far."""
        before = self._spends.get(client) or self._plans[client].initial_spend(client)
        history = self._journal.history(client, after=before.rounds)
        if not history:
            return before
        self._spends[client] = before.after(history)
        return self._spends[client]
