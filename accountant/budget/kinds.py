"""The two kinds of budget behind `filter.PrivacyFilter`."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fedsim.accountant.accountants import Accountant, AccountantChoice, make_accountant
from fedsim.accountant.adjacency import Adjacency
from fedsim.accountant.composition import UnsupportedEventError, break_down
from fedsim.accountant.events import Event
from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.rdp.curves import leak, total_rdp
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, check_orders
from fedsim.accountant.search import largest_count


class Budget(Protocol):
    """The rule of a `filter.PrivacyFilter`: what it grants and what it has spent."""

    order: float | None  # the Rényi order of the filter, if it has one

    def max_count(self, event: Event) -> int:
        """Return the number of further releases of `event` that fit."""
        ...

    def charge(self, event: Event, count: int) -> None:
        """Add `count` releases, whether they fit or not."""
        ...

    def spent(self) -> float:
        """Return epsilon of everything charged."""
        ...


class FixedSchedule:
    """Any accountant's epsilon of everything charged stays at or below the target."""

    order: float | None = None

    def __init__(
        self, epsilon: float, delta: float, adjacency: Adjacency, name: AccountantChoice
    ) -> None:
        self._target, self._delta = epsilon, delta
        self._adjacency: Adjacency = adjacency
        self._name: AccountantChoice = name
        self._counts: Counter[Event] = Counter()
        self._account(name)  # refuses unknown names

    def max_count(self, event: Event) -> int:
        """Return the number of further releases of `event` that fit."""
        # Rényi DP is cheap and never far above: a good start for the search by another accountant.
        guess = 1
        if self._name == "pld":
            guess = largest_count(lambda n: self._cost("rdp", event, n), self._target)
        return largest_count(
            lambda n: self._cost(self._name, event, n), self._target, start=max(1, guess)
        )

    def charge(self, event: Event, count: int) -> None:
        """Add `count` releases, whether they fit or not."""
        self._counts[event] += count

    def spent(self) -> float:
        """Return epsilon of everything charged."""
        return self._account(self._name).get_epsilon(self._delta)

    def _cost(self, name: AccountantChoice, event: Event, count: int) -> float:
        return self._account(name).compose(event, count).get_epsilon(self._delta)

    def _account(self, name: AccountantChoice) -> Accountant:
        accountant = make_accountant(name, adjacency=self._adjacency)
        for event, count in self._counts.items():
            accountant.compose(event, count)
        return accountant


class RenyiFilter:
    """The Rényi DP of everything charged, at one order, stays at or below its budget B."""

    def __init__(
        self,
        epsilon: float,
        delta: float,
        adjacency: Adjacency,
        orders: Sequence[float] = DEFAULT_ORDERS,
    ) -> None:
        self.order: float | None
        self._delta = delta
        self._adjacency: Adjacency = adjacency
        alphas = np.array(check_orders(tuple(orders)))
        room = (
            epsilon - np.log1p(-1.0 / alphas) + (math.log(delta) + np.log(alphas)) / (alphas - 1.0)
        )
        best = int(np.argmax(room / alphas))
        self._alpha, self._limit = float(alphas[best]), float(room[best])
        if self._limit <= 0.0:
            raise ValueError(
                f"order={self._alpha!r} leaves no budget for epsilon={epsilon!r} at "
                f"delta={delta!r}: "
                "use a larger order, or a larger target_epsilon or delta"
            )
        self.order = self._alpha
        self._limit *= 1.0 - 1e-12  # whatever rounding does to the sums below
        self._counts: Counter[Event] = Counter()
        self._costs: dict[Event, float] = {}

    def max_count(self, event: Event) -> int:
        """Return the number of further releases of `event` that fit."""
        cost, used = self._cost(event), self._used()
        return largest_count(lambda n: used + n * cost, self._limit)

    def charge(self, event: Event, count: int) -> None:
        """Add `count` releases, whether they fit or not."""
        self._counts[event] += count

    def spent(self) -> float:
        """Return epsilon of everything charged."""
        used = np.array([self._used()])
        return epsilon_from_rdp((self._alpha,), used, self._delta)[0]

    def _used(self) -> float:
        return math.fsum(count * self._cost(event) for event, count in self._counts.items())

    def _cost(self, event: Event) -> float:
        if event not in self._costs:
            breakdown = break_down(event, 1, self._adjacency)
            steps = breakdown.steps.items()
            if leak(steps) > 0.0:
                raise UnsupportedEventError(
                    f"no rule for {event!r} in mode 'adaptive': a Rényi filter cannot account for "
                    "events with a delta of their own; use mode 'fixed_schedule' or pure events"
                )
            rdp = float(total_rdp(steps, (self._alpha,))[0])
            self._costs[event] = math.inf if breakdown.non_private else rdp
        return self._costs[event]
