"""The latest privacy ledger of every client, and the ε of the whole federation.

The ε of the federation is the largest ε of any client, not an average. A client may report a second
ledger, for a server that sees each single upload; this ledger is checked too.

Clients with equal ledgers, δ and target ε form a group, and ε is computed once for each group. So
the time of a round grows with its participants and the groups, not with all clients.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fedsim.accountant import Event, FleetAccountant, PrivacyLedger, UnsupportedEventError
from fedsim.accountant.accountants import AccountantChoice
from fedsim.accountant.events import Adjacency
from fedsim.accountant.sampler_slack import SHARE, epsilon_with_slack, sampler_slack
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ProtocolError

_MOST_OWN_EPSILONS = 1 << 16  # kept in memory


class _Kind(NamedTuple):
    """The values that determine a client's ε; clients with equal values have the same ε."""

    entries: tuple[tuple[Event, int], ...]
    delta: float
    target_epsilon: float | None

    @classmethod
    def of(cls, spend: ClientSpend) -> "_Kind":
        return cls(spend.ledger.entries, spend.delta, spend.target_epsilon)

    @property
    def counts(self) -> Mapping[Event, int]:
        """The number of releases of each event."""
        counts: Counter[Event] = Counter()
        for event, count in self.entries:
            counts[event] += count
        return counts


@dataclass(slots=True)
class _Group:
    """Clients with the same ε.

    Attributes:
        kind: the values that determine ε.
        ledger: the ledger that these clients share in memory.
        clients: their number.
    """

    kind: _Kind
    ledger: PrivacyLedger
    clients: int = 0


class ClientLedgers:
    """The latest privacy spend (ledger and δ) that each client reported, and the ε of each spend.

    Args:
        accountant: the name of the accountant that computes ε.
        adjacency: the neighbouring relation of the guarantee.
        recorded: function that returns a client's spend from the ledger on disk. None without such
            a ledger; a charge whose reply was lost is then unknown until the client's next reply.
    """

    def __init__(
        self,
        accountant: AccountantChoice,
        adjacency: Adjacency = "zero_out",
        *,
        recorded: Callable[[int], ClientSpend] | None = None,
    ) -> None:
        self._recorded = recorded
        self._spends: dict[int, ClientSpend] = {}
        self._accountant: AccountantChoice = accountant
        self._adjacency: Adjacency = adjacency
        self._groups: dict[_Kind, _Group] = {}
        self._group_of: dict[int, _Group] = {}
        self._bounds: dict[_Kind, float] = {}  # ε of the kinds in `_groups`, where known
        self._own_epsilons: dict[_Kind, float] = {}

    @cached_property
    def _fleet(self) -> FleetAccountant:
        return FleetAccountant(self._accountant, adjacency=self._adjacency)

    @property
    def spends(self) -> dict[int, ClientSpend]:
        """Latest privacy spend of each client, by client number."""
        return dict(sorted(self._spends.items()))

    def record(self, spend: ClientSpend) -> None:
        """Replace a client's recorded privacy spend (ledger and δ) with a newly reported one.

        Raises:
            ProtocolError: a reported ledger does not extend the client's previous one, or the
                accountant cannot account for one of its events. Nothing is recorded then.
        """
        before = self._spends.get(spend.client)
        self._check_extension(spend.client, spend.ledger, before and before.ledger)
        second = before and before.against_server
        if spend.against_server is not None or second is not None:
            self._check_extension(spend.client, spend.against_server or PrivacyLedger(), second)
        if before is not None:
            self._leave(self._group_of[spend.client])
        kind = _Kind.of(spend)
        group = self._groups.get(kind)
        if group is None:
            group = self._groups[kind] = _Group(kind, spend.ledger)
        group.clients += 1
        self._group_of[spend.client] = group
        self._spends[spend.client] = spend.changed(ledger=group.ledger)

    def _leave(self, group: _Group) -> None:
        """Take a client out of a group, and forget a group without clients."""
        group.clients -= 1
        if not group.clients:
            del self._groups[group.kind]
            self._bounds.pop(group.kind, None)

    def _check_extension(
        self, client: int, ledger: PrivacyLedger, before: PrivacyLedger | None
    ) -> None:
        """Check that a ledger extends the previous one by events that the accountant supports.

        Raises:
            ProtocolError: the ledger does not extend it, or an event has no accounting rule.
        """
        known = PrivacyLedger() if before is None else before
        try:
            new = ledger.entries_after(known)
        except ValueError:
            raise ProtocolError(
                f"client {client} reports a ledger that does not extend its previous one"
            ) from None
        try:
            for event, _ in new:
                self._fleet.check(event)
        except UnsupportedEventError as error:
            raise ProtocolError(f"client {client} reports a release: {error}") from error

    def look_up(self, client: int) -> None:
        """Record the privacy spend of a client whose reply was lost, from the ledger on disk.

        If the client itself has reported the same round or a later one, that report stays.
        """
        if self._recorded is None:
            return
        spend, before = self._recorded(client), self._spends.get(client)
        if spend.rounds > (0 if before is None else before.rounds):
            self.record(spend)

    def epsilons(self) -> dict[int, float]:
        """Return each client's ε at the client's own δ, by client number (∞ without noise).

        Each ε includes a small term because the sampled noise is not exactly Gaussian. A
        `FleetAccountant` computes all ε together. The noise was calibrated with an accountant for a
        single client. Both accountants give valid bounds, which differ by up to 2e-4. The result
        has the bound of the single-client accountant in two cases: for the largest ε, and for a
        client whose bound by `FleetAccountant` is above the client's target.
        """
        bounds, groups = self._epsilon_bounds(), sorted(self._group_of.items())
        epsilons = {client: bounds[group.kind] for client, group in groups}
        largest = 0.0
        for client in sorted(epsilons, key=epsilons.__getitem__, reverse=True):
            if epsilons[client] <= largest:
                break
            epsilons[client] = self._own_epsilon(self._group_of[client].kind)
            largest = max(largest, epsilons[client])
        return epsilons

    def epsilon_max(self) -> float | None:
        """Return the largest ε of any client so far, or None before the first report.

        Guarantee: the result is the maximum of `epsilons`. It is computed once for all clients with
        equal ledger, δ and target ε.
        """
        bounds = self._epsilon_bounds()
        largest = 0.0 if bounds else None
        for kind in sorted(bounds, key=bounds.__getitem__, reverse=True):
            if largest is None or bounds[kind] <= largest:
                break
            largest = max(largest, self._own_epsilon(kind))
        return largest

    def _epsilon_bounds(self) -> Mapping[_Kind, float]:
        """Return ε of every kind from the fleet, or from its own accountant if above its target."""
        new: dict[float, list[_Kind]] = {}
        for kind in self._groups:
            if kind not in self._bounds:
                new.setdefault(kind.delta, []).append(kind)
        for delta, kinds in new.items():
            compositions = [kind.counts for kind in kinds]
            together = self._fleet.epsilons_of(compositions, delta * (1.0 - SHARE)).tolist()
            for kind, epsilon in zip(kinds, together, strict=True):
                if kind.entries:  # also where ε is 0 at this δ
                    epsilon += sampler_slack(epsilon, delta).epsilon
                above = kind.target_epsilon is not None and epsilon > kind.target_epsilon
                self._bounds[kind] = self._own_epsilon(kind) if above else epsilon
        return self._bounds

    def _own_epsilon(self, kind: _Kind) -> float:
        if kind not in self._own_epsilons:
            if len(self._own_epsilons) >= _MOST_OWN_EPSILONS:
                self._own_epsilons.clear()
            counts = kind.counts
            self._own_epsilons[kind] = epsilon_with_slack(
                lambda delta: self._fleet.own_epsilon_of(counts, delta), kind.delta
            )
        return self._own_epsilons[kind]
