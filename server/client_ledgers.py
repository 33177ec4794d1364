"""The server's book of privacy statements: the ledger of every client, as it reported it.

The book never averages. The federation's guarantee is the largest ε of any client.
"""

from collections.abc import Callable

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.adjacency import Adjacency
from fedsim.protocol.messages import PrivacyStatement, ProtocolError


class ClientLedgers:
    """Latest privacy statement and ε of every client that reported one.

    Args:
        accountant: what ε is computed by.
        adjacency: what it protects against.
        recorded: what the durable ledger says of a client, None where it never was charged. Without
            it, as for a server that is no simulation, a charge whose answer was lost is known when
            the client answers next.
    """

    def __init__(
        self,
        accountant: AccountantName,
        adjacency: Adjacency = "zero_out",
        *,
        recorded: Callable[[int], PrivacyStatement | None] | None = None,
    ) -> None:
        self._accountant: AccountantName = accountant
        self._adjacency: Adjacency = adjacency
        self._recorded = recorded
        self._statements: dict[int, PrivacyStatement] = {}
        # By ledger and δ: of the clients that spent the same, one is computed.
        self._epsilons: dict[tuple[str, float], float] = {}

    @property
    def statements(self) -> dict[int, PrivacyStatement]:
        """The latest statement of each client, by client."""
        return dict(sorted(self._statements.items()))

    def record(self, statement: PrivacyStatement) -> None:
        """Take a client's new statement.

        Raises:
            ProtocolError: it shows less spent than the client's previous one.
        """
        before = self._statements.get(statement.client)
        if before is not None and not _extends(statement.ledger, before.ledger):
            raise ProtocolError(
                f"client {statement.client} reports a ledger that does not extend its previous one"
            )
        self._statements[statement.client] = statement

    def look_up(self, client: int) -> None:
        """Take what the durable ledger says of a client whose answer was lost: it is spent.

        What the client itself said later than the ledger's last record stays.
        """
        statement = None if self._recorded is None else self._recorded(client)
        before = self._statements.get(client)
        if statement is not None and (before is None or statement.rounds > before.rounds):
            self.record(statement)

    def epsilon(self, client: int) -> float:
        """Return ε of one client at its own δ, from its ledger (∞ where it adds no noise)."""
        return self._epsilon(self._statements[client])

    def epsilon_max(self) -> float | None:
        """Return the largest ε of any client so far, or None before the first statement."""
        different = {_spent(statement): statement for statement in self._statements.values()}
        self._epsilons = {key: e for key, e in self._epsilons.items() if key in different}
        return max(map(self._epsilon, different.values()), default=None)

    def _epsilon(self, statement: PrivacyStatement) -> float:
        key = _spent(statement)
        if key not in self._epsilons:
            self._epsilons[key] = statement.ledger.epsilon(
                statement.delta, accountant=self._accountant, adjacency=self._adjacency
            )
        return self._epsilons[key]


def _spent(statement: PrivacyStatement) -> tuple[str, float]:
    """Return what decides a client's ε."""
    return statement.ledger.to_text(), statement.delta


def _extends(new: PrivacyLedger, old: PrivacyLedger) -> bool:
    """Tell whether `old` is a prefix of `new`, both run-length encoded."""
    entries, previous = list(new.entries), list(old.entries)
    if not previous:
        return True
    last = len(previous) - 1
    return (
        len(entries) > last
        and entries[:last] == previous[:last]
        and entries[last][0] == previous[last][0]
        and entries[last][1] >= previous[last][1]
    )
