"""The account of every client of a federation, computed for all of them at once."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from scipy.sparse import csr_array

from fedsim.accountant import checks
from fedsim.accountant.accountants import Accountant, AccountantName, make_accountant
from fedsim.accountant.adjacency import Adjacency
from fedsim.accountant.arrays import Floats
from fedsim.accountant.composition import Breakdown, Mechanism, break_down
from fedsim.accountant.events import SCHEMA_VERSION, Event, event_from_dict, to_dict
from fedsim.accountant.fleet.pld import pld_epsilons
from fedsim.accountant.rdp.curves import leak
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS
from fedsim.accountant.rdp.table import epsilons_from_rdp, rdp_table

Client = str | int


class FleetAccountant:
    """One account per client, for thousands of clients with events of their own.

    A client's epsilon is the one of a single accountant of the same name that composed the same
    events: by "rdp" to 1e-12 relative, by "pld" to 2e-4 (both never below the exact value; the
    fleet chooses its grids for the delta asked for). What is fast is (sampled) Gaussians: their
    curves are computed together, as arrays; other mechanisms are computed one by one.

    Guarantee: client k's releases are (get_epsilon(delta)[k], delta)-DP per example of client k.
    Where no person has data in two clients, the federation's guarantee is the largest of these
    (parallel composition), never the mean.

    Args:
        accountant: "rdp", "pld", or any other accountant's name (those run one by one).
        adjacency: as of the single accountants.

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
        self, accountant: AccountantName = "rdp", *, adjacency: Adjacency = "zero_out"
    ) -> None:
        self._name: AccountantName = accountant
        self._adjacency: Adjacency = adjacency
        self._single()  # refuses unknown names
        self._breakdowns: dict[Event, Breakdown] = {}
        self._counts: dict[Client, Counter[Event]] = {}
        self._curves: dict[Mechanism, Floats] = {}
        self._last: tuple[float, Floats] | None = None

    @property
    def clients(self) -> tuple[Client, ...]:
        """All clients, in the order in which they first composed something."""
        return tuple(self._counts)

    def events(self, client: Client) -> Mapping[Event, int]:
        """Returns how often `client` released each event; empty for one that never did."""
        return dict(self._counts.get(client, {}))

    def compose(self, client: Client, event: Event, count: int = 1) -> Self:
        """Adds `count` releases of `event` to the account of `client`; returns the fleet itself.

        Raises:
            UnsupportedEventError: the accountant has no rule for the event; nothing was added.
            ValueError: `client` is not a name or number, `event` is not an event, or `count` is
                negative or not whole; nothing was added.
        """
        count = checks.whole_number("count", count)
        self._learn(event)
        counts = self._account(client)
        if count:
            counts[event] += count
        self._last = None
        return self

    def get_epsilon(self, delta: float) -> dict[Client, float]:
        """Returns each client's epsilon at `delta`; raises ValueError if it is not in (0, 1)."""
        return dict(zip(self._counts, self.get_epsilons(delta).tolist(), strict=True))

    def get_epsilons(self, delta: float) -> Floats:
        """Returns the epsilons at `delta` as an array, in the order of `clients`.

        Raises:
            ValueError: `delta` is not in (0, 1).
        """
        delta = checks.open_probability("delta", delta)
        if self._last is None or self._last[0] != delta:
            self._last = (delta, self._epsilons(delta))
        return self._last[1].copy()

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state as JSON values."""
        numbers = {event: i for i, event in enumerate(self._breakdowns)}
        return {
            "schema_version": SCHEMA_VERSION,
            "accountant": self._name,
            "adjacency": self._adjacency,
            "events": [to_dict(event) for event in self._breakdowns],
            "clients": [
                {"client": client, "counts": [[numbers[e], n] for e, n in counts.items()]}
                for client, counts in self._counts.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Replaces everything by the state that `state_dict` wrote; returns the fleet itself.

        Raises:
            ValueError: the state is of another version, accountant or adjacency, or is malformed;
                the fleet is as before.
        """
        expected = (SCHEMA_VERSION, self._name, self._adjacency)
        names = ("schema_version", "accountant", "adjacency")
        for name, value in zip(names, expected, strict=True):
            if not isinstance(state, Mapping) or state.get(name) != value:
                raise ValueError(f"state must have {name}={value!r}, got {state!r:.200}")
        loaded = FleetAccountant(self._name, adjacency=self._adjacency)
        try:
            events = [event_from_dict(record) for record in state["events"]]
            for record in state["clients"]:
                loaded._account(record["client"])
                for number, count in record["counts"]:
                    if number < 0:  # Python would count from the end
                        raise IndexError(number)
                    loaded.compose(record["client"], events[number], count)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"state is malformed: {error!r}") from error
        self.__dict__.update(loaded.__dict__)
        return self

    def _account(self, client: Client) -> Counter[Event]:
        if isinstance(client, bool) or not isinstance(client, (str, int)):
            raise ValueError(f"client must be a str or an int, got {client!r}")
        return self._counts.setdefault(client, Counter())

    def _single(self) -> Accountant:
        return make_accountant(self._name, adjacency=self._adjacency)

    def _learn(self, event: Event) -> None:
        """Breaks down an event that is new to the fleet, once; raises if there is no rule."""
        if not isinstance(event, Event):
            raise ValueError(f"event must be a privacy event such as Gaussian(1.0), got {event!r}")
        if event not in self._breakdowns:
            self._single().compose(event)
            self._breakdowns[event] = break_down(event, 1, self._adjacency)

    def _epsilons(self, delta: float) -> Floats:
        epsilons = np.zeros(len(self._counts))
        rows: list[int] = []
        together: list[Counter[Mechanism]] = []
        for row, counts in enumerate(self._counts.values()):
            steps = self._steps(counts)
            if steps is None:
                epsilons[row] = math.inf
            elif steps and self._name not in ("rdp", "pld"):
                epsilons[row] = self._one_by_one(counts, delta)
            elif steps:
                rows.append(row)
                together.append(steps)
        if rows:
            answer = pld_epsilons if self._name == "pld" else self._rdp_epsilons
            epsilons[rows] = answer(together, delta)
        return epsilons

    def _steps(self, counts: Counter[Event]) -> Counter[Mechanism] | None:
        """Returns all mechanisms of a client; None after a release without any guarantee."""
        steps: Counter[Mechanism] = Counter()
        for event, count in counts.items():
            breakdown = self._breakdowns[event]
            if breakdown.non_private:
                return None
            for mechanism, times in breakdown.steps.items():
                steps[mechanism] += times * count
        return steps

    def _one_by_one(self, counts: Counter[Event], delta: float) -> float:
        accountant = self._single()
        for event, count in counts.items():
            accountant.compose(event, count)
        return accountant.get_epsilon(delta)

    def _rdp_epsilons(self, clients: Sequence[Counter[Mechanism]], delta: float) -> Floats:
        """Returns all epsilons from one product: (clients x mechanisms) times their curves."""
        new = list({kind: None for steps in clients for kind in steps if kind not in self._curves})
        self._curves.update(zip(new, rdp_table(new, DEFAULT_ORDERS), strict=True))
        columns = {kind: i for i, kind in enumerate(self._curves)}
        where = [columns[kind] for steps in clients for kind in steps]
        counts = [float(count) for steps in clients for count in steps.values()]
        ends = np.cumsum([0, *map(len, clients)])
        matrix = csr_array((counts, where, ends), shape=(len(clients), len(columns)))
        rdp = np.asarray(matrix @ np.stack(list(self._curves.values())))
        leaks = np.array([leak(steps.items()) for steps in clients])
        return epsilons_from_rdp(DEFAULT_ORDERS, rdp, delta, leaks)
