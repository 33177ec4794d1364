"""What clients have spent according to the durable ledger, whatever came of their answers."""

from flwr.app import RecordDict

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.account import PrivacyAccount
from fedsim.clients.budget.plan import PrivacyPlan
from fedsim.protocol.messages import PrivacyStatement


class RecordedSpend:
    """Reads clients' accounts from the ledger; of a client asked for again, only what is new.

    Args:
        plans: the plan of every client.
        journal: the durable ledger of the run.
    """

    def __init__(self, plans: tuple[PrivacyPlan, ...], journal: FileJournal) -> None:
        self._plans = plans
        self._journal = journal
        self._states: dict[int, RecordDict] = {}

    def clients(self) -> tuple[int, ...]:
        """Return the clients that were ever charged."""
        return self._journal.clients()

    def statement(self, client: int) -> PrivacyStatement | None:
        """Return what a client would say of its account now; None if it never was charged."""
        state = self._states.setdefault(client, RecordDict())
        account = PrivacyAccount.restore(state, client=client, journal=self._journal)
        account.save(state)
        return account.statement(self._plans[client]) if account.rounds else None
