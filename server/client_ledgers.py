"""The ledger of every client, as the client reported it, and ε of the federation.

Nothing is averaged here. The federation's guarantee is the largest ε of any client, in the view
that it is claimed for. The ledger against a server that sees single uploads is checked beside it.
"""

from collections.abc import Callable

from fedsim.accountant import Event, FleetAccountant, PrivacyLedger, UnsupportedEventError
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.adjacency import Adjacency
from fedsim.accountant.fleet.accountant import Client
from fedsim.accountant.sampler_slack import SHARE, epsilon_with_slack, sampler_slack
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ProtocolError

_MOST_OWN_EPSILONS = 1 << 16  # kept in memory


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
        self._recorded = recorded
        self._spends: dict[int, ClientSpend] = {}
        self._fleet = FleetAccountant(accountant, adjacency=adjacency)
        # By ledger and δ: of clients with equal ledgers, one is computed.
        self._own_epsilons: dict[tuple[str, float], float] = {}

    @property
    def spends(self) -> dict[int, ClientSpend]:
        """The latest spend of each client, by client."""
        return dict(sorted(self._spends.items()))

    def record(self, spend: ClientSpend) -> None:
        """Record the new spend of a client.

        Raises:
            ProtocolError: a ledger of it does not extend the client's previous one, or holds an
                event without an accounting rule; nothing was recorded.
        """
        before = self._spends.get(spend.client)
        new = self._extension(spend.client, spend.ledger, before and before.ledger)
        second = before and before.against_server
        if spend.against_server is not None or second is not None:
            self._extension(spend.client, spend.against_server or PrivacyLedger(), second)
        for event, count in new:
            self._fleet.compose(spend.client, event, count)
        self._spends[spend.client] = spend

    def _extension(
        self, client: int, ledger: PrivacyLedger, before: PrivacyLedger | None
    ) -> tuple[tuple[Event, int], ...]:
        """Return what a ledger adds to the one before, checked."""
        known = PrivacyLedger() if before is None else before
        if not ledger.starts_with(known):
            raise ProtocolError(
                f"client {client} reports a ledger that does not extend its previous one"
            )
        new = ledger.entries_after(known)
        try:
            for event, _ in new:
                self._fleet.check(event)
        except UnsupportedEventError as error:
            raise ProtocolError(f"client {client} reports a release: {error}") from error
        return new

    def look_up(self, client: int) -> None:
        """Record the spend of a client whose reply was lost, by the durable ledger.

        A later report of the client itself stays.
        """
        if self._recorded is None:
            return
        spend, before = self._recorded(client), self._spends.get(client)
        if spend.rounds > (0 if before is None else before.rounds):
            self.record(spend)

    def epsilons(self) -> dict[int, float]:
        """Return ε of every client at its own δ, by client (∞ where it adds no noise).

        Each has the slack of the sampler in it. A `FleetAccountant` computes them together. Its
        bound and that of an accountant of the client's own both hold, and differ by up to 2e-4. The
        own accountant calibrated the noise, so it decides where the difference shows: for the
        largest ε, and where the fleet's bound is above a client's target.
        """
        spends, epsilons = self.spends, dict[int, float]()
        deltas: dict[Client, float] = {
            client: spend.delta * (1.0 - SHARE) for client, spend in spends.items()
        }
        together = self._fleet.get_epsilon(deltas)
        for client, spend in spends.items():
            epsilon, target = together[client], spend.target_epsilon
            if epsilon > 0.0:
                epsilon += sampler_slack(epsilon, spend.delta).epsilon
            above = target is not None and epsilon > target
            epsilons[client] = self._own_epsilon(spend) if above else epsilon
        largest = 0.0
        for client in sorted(epsilons, key=epsilons.__getitem__, reverse=True):
            if epsilons[client] <= largest:
                break
            epsilons[client] = self._own_epsilon(spends[client])
            largest = max(largest, epsilons[client])
        return epsilons

    def epsilon(self, client: int) -> float:
        """Return ε of one client, as `epsilons` does."""
        return self.epsilons()[client]

    def epsilon_max(self) -> float | None:
        """Return the largest ε of any client so far, or None before the first report."""
        return max(self.epsilons().values(), default=None)

    def _own_epsilon(self, spend: ClientSpend) -> float:
        key = spend.ledger.to_text(), spend.delta
        if key not in self._own_epsilons:
            if len(self._own_epsilons) >= _MOST_OWN_EPSILONS:
                self._own_epsilons.clear()
            self._own_epsilons[key] = epsilon_with_slack(
                lambda delta: self._fleet.get_own_epsilon(spend.client, delta), spend.delta
            )
        return self._own_epsilons[key]
