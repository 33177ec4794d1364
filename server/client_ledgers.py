"""The ledger of every client, as the client reported it, and ε of the federation.

Nothing is averaged here. The federation's guarantee is the largest ε of any client.
"""

from collections.abc import Callable

from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.adjacency import Adjacency
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ProtocolError


class ClientLedgers:
    """Latest spend and ε of every client that reported one.

    Args:
        accountant: the name of the accountant of ε.
        adjacency: what ε protects against.
        recorded: returns the spend of a client by the durable ledger. None where the server has no
            ledger; a charge whose reply was lost is then known when the client answers next.
    """

    def __init__(
        self,
        accountant: AccountantName,
        adjacency: Adjacency = "zero_out",
        *,
        recorded: Callable[[int], ClientSpend] | None = None,
    ) -> None:
        self._accountant: AccountantName = accountant
        self._adjacency: Adjacency = adjacency
        self._recorded = recorded
        self._spends: dict[int, ClientSpend] = {}
        # By ledger and δ: of the clients that spent the same, one is computed.
        self._epsilons: dict[tuple[str, float], float] = {}

    @property
    def spends(self) -> dict[int, ClientSpend]:
        """The latest spend of each client, by client."""
        return dict(sorted(self._spends.items()))

    def record(self, spend: ClientSpend) -> None:
        """Record the new spend of a client.

        Raises:
            ProtocolError: its ledger does not extend the client's previous one.
        """
        before = self._spends.get(spend.client)
        if before is not None and not spend.ledger.starts_with(before.ledger):
            raise ProtocolError(
                f"client {spend.client} reports a ledger that does not extend its previous one"
            )
        self._spends[spend.client] = spend

    def look_up(self, client: int) -> None:
        """Record the spend of a client whose reply was lost, by the durable ledger.

        A later report of the client itself stays.
        """
        if self._recorded is None:
            return
        spend, before = self._recorded(client), self._spends.get(client)
        if spend.rounds > (0 if before is None else before.rounds):
            self.record(spend)

    def epsilon(self, client: int) -> float:
        """Return ε of one client at its own δ, from its ledger (∞ where it adds no noise)."""
        return self._epsilon(self._spends[client])

    def epsilon_max(self) -> float | None:
        """Return the largest ε of any client so far, or None before the first report."""
        different = {_spent(spend): spend for spend in self._spends.values()}
        self._epsilons = {key: e for key, e in self._epsilons.items() if key in different}
        return max(map(self._epsilon, different.values()), default=None)

    def _epsilon(self, spend: ClientSpend) -> float:
        key = _spent(spend)
        if key not in self._epsilons:
            self._epsilons[key] = spend.ledger.epsilon(
                spend.delta, accountant=self._accountant, adjacency=self._adjacency
            )
        return self._epsilons[key]


def _spent(spend: ClientSpend) -> tuple[str, float]:
    """Return what decides a client's ε."""
    return spend.ledger.to_text(), spend.delta
