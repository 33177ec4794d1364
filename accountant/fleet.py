"""Privacy accounts of all clients of a federation; the clients' ε are computed together."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.accountants import Accountant, AccountantChoice, RdpOrders, make_accountant
from fedsim.accountant.checks import Floats
from fedsim.accountant.composition import Breakdown, Mechanism, break_down
from fedsim.accountant.events import Adjacency, Event
from fedsim.accountant.pld.fleet import MechanismCurves, pld_epsilons
from fedsim.accountant.pld.privacy_profile import composed_epsilon, exactly_composable
from fedsim.accountant.rdp.curves import epsilons_from_rdp, leak, rdp_table
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS

Client = str | int


class FleetAccountant:
    """An accountant with one privacy account per client, fast for thousands of clients.

    Each client's epsilon agrees with that of a single-client accountant of the same name that
    composed the same events: to 1e-12 relative for "rdp", and to 2e-4 absolute for "pld". Both
    values are upper bounds; they differ for "pld" since the rounding of privacy losses depends on
    the requested delta. Gaussian mechanisms, sampled or not, are fast: they are computed together,
    as arrays. Other mechanisms are computed one by one. The epsilon of a client without new events
    is kept, and equal accounts are computed once.

    Guarantee: client k's releases are (get_epsilon(delta)[k], delta)-DP per example of client k. If
    no person has data in two clients, the federation's guarantee is the largest of these (parallel
    composition), never the mean.

    Args:
        accountant: name of the accountant, or `RdpOrders`; accounts by "moments" are computed
            one by one.
        adjacency: "zero_out", "add_remove" or "replace_one".

    Raises:
        ValueError: there is no such accountant or adjacency.

    Example:
        >>> from fedsim.accountant.events import Gaussian
        >>> fleet = FleetAccountant("pld").compose("a", Gaussian(2.0), 4)
        >>> fleet = fleet.compose("b", Gaussian(9.0))
        >>> {client: round(epsilon, 3) for client, epsilon in fleet.get_epsilon(1e-5).items()}
        {'a': 4.377, 'b': 0.382}
    """

    def __init__(
        self, accountant: AccountantChoice = "rdp", *, adjacency: Adjacency = "zero_out"
    ) -> None:
        self._name: AccountantChoice = accountant
        self._orders = accountant.orders if isinstance(accountant, RdpOrders) else DEFAULT_ORDERS
        self._adjacency: Adjacency = adjacency
        self._single()  # refuses unknown names
        self._breakdowns: dict[Event, Breakdown] = {}
        self._counts: dict[Client, Counter[Event]] = {}
        self._rdp_curves: dict[Mechanism, Floats] = {}
        self._pld_curves = MechanismCurves()
        self._answers: dict[Client, tuple[float, float]] = {}  # (delta, epsilon)

    @property
    def clients(self) -> tuple[Client, ...]:
        """Names or numbers of all clients, in the order of their first composed event."""
        return tuple(self._counts)

    def compose(self, client: Client, event: Event, count: int = 1) -> Self:
        """Add `count` releases of `event` to the account of `client`; return the fleet accountant.

        Args:
            client: the client's name or number.
            event: the release to add.
            count: number of releases, a whole number >= 0.

        Raises:
            UnsupportedEventError: the accountant has no rule for the event; nothing was added.
            ValueError: `client` is not a name or number, `event` is not an event, or `count` is
                negative or not whole; nothing was added.
        """
        count = checks.whole_number("count", count)
        self.check(event)
        if isinstance(client, bool) or not isinstance(client, (str, int)):
            raise ValueError(f"client must be a str or an int, got {client!r}")
        counts = self._counts.setdefault(client, Counter())
        if count:
            counts[event] += count
            self._answers.pop(client, None)
        return self

    def check(self, event: Event) -> None:
        """Check that the accountant has a rule for an event; raise an error if it has none.

        Raises:
            UnsupportedEventError: the accountant has no rule for the event.
            ValueError: `event` is not an event.
        """
        if not isinstance(event, Event):
            raise ValueError(f"event must be a privacy event such as Gaussian(1.0), got {event!r}")
        if event not in self._breakdowns:
            self._breakdowns[event] = break_down(event, 1, self._adjacency)

    def get_epsilon(self, delta: float | Mapping[Client, float]) -> dict[Client, float]:
        """Return a dict from client to epsilon, for all clients or for the clients in `delta`.

        Args:
            delta: one delta for all clients, or the delta of each requested client. A requested
                client without events has epsilon 0.

        Raises:
            ValueError: a delta is not in (0, 1).
        """
        if not isinstance(delta, Mapping):
            delta = dict.fromkeys(self._counts, checks.open_probability("delta", delta))
        groups: dict[float, list[Client]] = {}
        for client, value in delta.items():
            groups.setdefault(checks.open_probability("delta", value), []).append(client)
        for value, clients in groups.items():
            self._answer(clients, value)
        return {client: self._answers[client][1] for client in delta}

    def own_epsilon_of(self, composition: Mapping[Event, int], delta: float) -> float:
        """Return the epsilon of a composition of events, by a new accountant for one client.

        The accounts of the clients do not change.

        Args:
            composition: number of releases of each event.
            delta: in (0, 1).

        Raises:
            UnsupportedEventError: the accountant has no rule for an event.
            ValueError: `delta` is not in (0, 1).
        """
        accountant = self._single()
        for event, count in composition.items():
            accountant.compose(event, count)
        return accountant.get_epsilon(delta)

    def epsilons_of(self, compositions: Sequence[Mapping[Event, int]], delta: float) -> Floats:
        """Return the epsilon of each composition of events, float64 (compositions,).

        The accounts of the clients do not change.

        Args:
            compositions: for each composition, the number of releases of each event; an empty
                composition has epsilon 0.
            delta: in (0, 1).

        Raises:
            UnsupportedEventError: the accountant has no rule for an event.
            ValueError: `delta` is not in (0, 1).
        """
        delta = checks.open_probability("delta", delta)
        for event in {event for counts in compositions for event in counts}:
            self.check(event)
        return self._epsilons_of(compositions, delta)

    def _single(self) -> Accountant:
        return make_accountant(self._name, adjacency=self._adjacency)

    def _answer(self, clients: Iterable[Client], delta: float) -> None:
        """Compute and keep the epsilon at `delta` of the clients whose epsilon is not kept yet."""
        new = [client for client in clients if self._answers.get(client, (None,))[0] != delta]
        epsilons = self._epsilons_of([self._counts.get(client, {}) for client in new], delta)
        self._answers |= {c: (delta, e) for c, e in zip(new, epsilons.tolist(), strict=True)}

    def _epsilons_of(self, compositions: Sequence[Mapping[Event, int]], delta: float) -> Floats:
        """Return the epsilon of each composition of known events."""
        epsilons = np.zeros(len(compositions))
        together: dict[int, Counter[Mechanism]] = {}
        for place, counts in enumerate(compositions):
            steps = self._steps(counts)
            if steps is None:
                epsilons[place] = math.inf
            elif steps and (self._name in ("rdp", "pld") or isinstance(self._name, RdpOrders)):
                together[place] = steps
            elif steps:
                epsilons[place] = self.own_epsilon_of(counts, delta)
        if together:
            kinds = list(together.values())
            epsilons[list(together)] = (
                pld_epsilons(kinds, delta, self._pld_curves)
                if self._name == "pld"
                else self._rdp_epsilons(kinds, delta)
            )
        return epsilons

    def _steps(self, counts: Mapping[Event, int]) -> Counter[Mechanism] | None:
        """Return all mechanisms of a client; None after a release without any guarantee."""
        steps: Counter[Mechanism] = Counter()
        for event, count in counts.items():
            breakdown = self._breakdowns[event]
            if breakdown.non_private:
                return None
            for mechanism, times in breakdown.steps.items():
                steps[mechanism] += times * count
        return steps

    def _rdp_epsilons(self, clients: Sequence[Counter[Mechanism]], delta: float) -> Floats:
        """Return all epsilons from one product: (clients x mechanisms) times their curves."""
        from scipy.sparse import csr_array  # slow to import, and few commands need it

        kinds = dict.fromkeys(kind for steps in clients for kind in steps)
        new = [kind for kind in kinds if kind not in self._rdp_curves]
        self._rdp_curves.update(zip(new, rdp_table(new, self._orders), strict=True))
        columns = {kind: i for i, kind in enumerate(self._rdp_curves)}
        where = [columns[kind] for steps in clients for kind in steps]
        counts = [float(count) for steps in clients for count in steps.values()]
        ends = np.cumsum([0, *map(len, clients)])
        matrix = csr_array((counts, where, ends), shape=(len(clients), len(columns)))
        rdp = np.asarray(matrix @ np.stack(list(self._rdp_curves.values())))
        leaks = np.array([leak(steps.items()) for steps in clients])
        epsilons = epsilons_from_rdp(self._orders, rdp, delta, leaks)
        for place, steps in enumerate(clients):
            if (kinds := exactly_composable(steps.items())) is not None:
                epsilons[place] = composed_epsilon(kinds, delta)
        return epsilons
