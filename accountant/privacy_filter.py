"""Privacy filters, which decide whether the next release still fits in the privacy budget."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.accountants import Accountant, AccountantChoice, RdpOrders, make_accountant
from fedsim.accountant.composition import UnsupportedEventError, break_down
from fedsim.accountant.events import Adjacency, Event, check_adjacency
from fedsim.accountant.ledger.privacy_ledger import PrivacyLedger
from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.rdp.curves import leak, total_rdp
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, check_orders
from fedsim.accountant.search import largest_count


class FixedSchedule:
    """A privacy budget in (epsilon, delta) for a schedule of releases that is fixed in advance."""

    order = None

    def __init__(
        self, epsilon: float, delta: float, adjacency: Adjacency, name: AccountantChoice
    ) -> None:
        self._target, self._delta = epsilon, delta
        self._adjacency: Adjacency = adjacency
        self._name: AccountantChoice = name
        self.counts: Counter[Event] = Counter()  # charged releases
        self._account(name)  # refuses unknown names

    def max_count(self, event: Event) -> int:
        """Return the number of further releases of `event` that the budget allows."""
        # Rényi DP is cheap and never far above: a good start for the search by another accountant.
        guess = 1
        if self._name == "pld":
            guess = largest_count(lambda n: self._cost("rdp", event, n), self._target)
        return largest_count(
            lambda n: self._cost(self._name, event, n), self._target, start=max(1, guess)
        )

    def spent(self) -> float:
        """Return the epsilon of all charged releases, at the delta of this budget."""
        return self._account(self._name).get_epsilon(self._delta)

    def _cost(self, name: AccountantChoice, event: Event, count: int) -> float:
        return self._account(name).compose(event, count).get_epsilon(self._delta)

    def _account(self, name: AccountantChoice) -> Accountant:
        accountant = make_accountant(name, adjacency=self._adjacency)
        for event, count in self.counts.items():
            accountant.compose(event, count)
        return accountant


class RenyiFilter:
    """A privacy budget that limits the summed RDP of all charged releases at one fixed order."""

    def __init__(
        self,
        epsilon: float,
        delta: float,
        adjacency: Adjacency,
        orders: Sequence[float] = DEFAULT_ORDERS,
    ) -> None:
        self._delta = delta
        self._adjacency: Adjacency = adjacency
        alphas = np.array(check_orders(tuple(orders)))
        room = (
            epsilon - np.log1p(-1.0 / alphas) + (math.log(delta) + np.log(alphas)) / (alphas - 1.0)
        )
        best = int(np.argmax(room / alphas))
        self.order, self._limit = float(alphas[best]), float(room[best])
        if self._limit <= 0.0:
            raise ValueError(
                f"order={self.order!r} leaves no budget for epsilon={epsilon!r} at "
                f"delta={delta!r}: "
                "use a larger order, or a larger target_epsilon or delta"
            )
        self._limit *= 1.0 - 1e-12  # covers the rounding of the sums below
        self.counts: Counter[Event] = Counter()  # charged releases
        self._costs: dict[Event, float] = {}

    def max_count(self, event: Event) -> int:
        """Return the number of further releases of `event` that the budget allows."""
        cost, used = self._cost(event), self._used()
        return largest_count(lambda n: used + n * cost, self._limit)

    def spent(self) -> float:
        """Return the epsilon of all charged releases, at the delta of this budget."""
        used = np.array([self._used()])
        return epsilon_from_rdp((self.order,), used, self._delta)[0]

    def _used(self) -> float:
        return math.fsum(count * self._cost(event) for event, count in self.counts.items())

    def _cost(self, event: Event) -> float:
        if event not in self._costs:
            breakdown = break_down(event, 1, self._adjacency)
            steps = breakdown.steps.items()
            if leak(steps) > 0.0:
                raise UnsupportedEventError(
                    f"no rule for {event!r} in mode 'adaptive': a Rényi filter cannot account for "
                    "events whose own delta is above 0; use mode 'fixed_schedule' or pure events"
                )
            rdp = float(total_rdp(steps, (self.order,))[0])
            self._costs[event] = math.inf if breakdown.non_private else rdp
        return self._costs[event]


FilterMode = Literal["fixed_schedule", "adaptive"]


class PrivacyFilter:
    """A filter that grants releases while all of them are jointly (target_epsilon, delta)-DP.

    - mode "fixed_schedule": the sampling rates and noise multipliers of all releases, and their
      order, must be fixed before the first release. The filter then only ends the schedule early.
      All accountants are allowed. Where it ends depends on the schedule alone and reveals nothing.
    - mode "adaptive": the next event may be chosen after looking at all releases so far. The rule
      is then a Rényi filter at ONE order a, which is fixed at construction. Releases are granted
      while the sum of their RDP at that order is at most B, with
      B = epsilon - log((a-1)/a) + log(delta a)/(a-1). This makes them (a, B)-RDP (Feldman, Zrnic
      2021, arXiv:2008.11193) and so (epsilon, delta)-DP (Canonne, Kamath, Steinke 2020, Proposition
      12).

    In adaptive mode the accountant "pld" is refused: a filter on the composed privacy loss
    distribution is not valid there (arXiv:2602.06756).

    A second request for the same event takes about a microsecond: the largest number of releases is
    computed once per event and counted down afterwards.

    Guarantee: for every sequence of requests, the releases granted never exceed the target under
    the stated adjacency. Releases added by `record` count, too.

    Args:
        target_epsilon: largest epsilon of all releases together, > 0.
        delta: the delta of that epsilon, in (0, 1).
        mode: "fixed_schedule" or "adaptive".
        accountant: "pld", "rdp", "moments" or `RdpOrders`; by default "pld", and "rdp" in
            adaptive mode.
        order: Rényi order > 1 of the adaptive filter. The default is the order that allows most
            Gaussian releases; it depends on epsilon and delta only. For sampled releases the best
            order of an `RdpAccountant` on the expected schedule is better.
        adjacency: "zero_out", "add_remove" or "replace_one".

    Raises:
        ValueError: an argument is outside its range, or the combination is not valid.

    Example:
        >>> from fedsim.accountant.events import Gaussian
        >>> budget = PrivacyFilter(1.0, 1e-5)
        >>> budget.request(Gaussian(10.0), 100), budget.is_affordable(Gaussian(10.0))
        (7, False)
    """

    def __init__(
        self,
        target_epsilon: float,
        delta: float,
        *,
        mode: FilterMode = "fixed_schedule",
        accountant: AccountantChoice | None = None,
        order: float | None = None,
        adjacency: Adjacency = "zero_out",
    ) -> None:
        self.target_epsilon = checks.positive("target_epsilon", target_epsilon)
        self.delta = checks.open_probability("delta", delta)
        self.mode: FilterMode = mode
        target = (self.target_epsilon, self.delta, check_adjacency(adjacency))
        self._budget: FixedSchedule | RenyiFilter
        if mode == "fixed_schedule":
            if order is not None:
                raise ValueError(f"order must be None in mode 'fixed_schedule', got {order!r}")
            self._budget = FixedSchedule(*target, accountant or "pld")
        elif mode == "adaptive":
            _require_rdp(accountant)
            self._budget = RenyiFilter(*target, _orders(accountant, order))
        else:
            raise ValueError(f"mode must be one of {list(get_args(FilterMode))}, got {mode!r}")
        self._ledger = PrivacyLedger()
        self._event: Event | None = None  # the event of the last request ...
        self._left = 0  # ... and how many more of it may be granted

    @property
    def ledger(self) -> PrivacyLedger:
        """A copy of the ledger of all granted and recorded releases, in order."""
        return PrivacyLedger().merge(self._ledger)

    @property
    def spent(self) -> float:
        """Epsilon at `delta` of all granted and recorded releases.

        In mode "adaptive" this epsilon is for display only: the guarantee there is the target
        itself.
        """
        return self._budget.spent()

    @property
    def order(self) -> float | None:
        """Rényi order of the adaptive filter; None in mode "fixed_schedule"."""
        return self._budget.order

    def is_affordable(self, event: Event, count: int = 1) -> bool:
        """Whether the budget allows `count` more releases of `event`; nothing is charged.

        Args:
            event: one release.
            count: number of releases, a whole number >= 0.

        Raises:
            UnsupportedEventError: the event has no accounting rule.
            ValueError: `event` is not an event, or `count` is negative or not whole.
        """
        if type(count) is not int or count < 0:
            count = checks.whole_number("count", count)
        return count <= self.max_count(event)

    def max_count(self, event: Event) -> int:
        """Return the number of further releases of `event` that the budget allows.

        The value 10^12 means that there is no limit.

        Raises:
            UnsupportedEventError: the event has no accounting rule.
            ValueError: `event` is not an event.
        """
        if event is not self._event and event != self._event:
            if not isinstance(event, Event):
                raise ValueError(f"event must be a privacy event, got {event!r}")
            self._left = self._budget.max_count(event)
            self._event = event
        return self._left

    def request(self, event: Event, count: int = 1) -> int:
        """Charge at most `count` releases of `event`, as the budget allows; return how many.

        Args:
            event: one release.
            count: number of releases requested, a whole number >= 0.

        Raises:
            UnsupportedEventError: the event has no accounting rule; nothing was charged.
            ValueError: `event` is not an event, or `count` is negative or not whole; nothing was
                charged.
        """
        granted = min(checks.whole_number("count", count), self.max_count(event))
        if granted:
            self._charge(event, granted)
            self._left -= granted
        return granted

    def record(self, event: Event, count: int = 1) -> None:
        """Charge releases that already happened, such as those of an interrupted run.

        Args:
            event: one release.
            count: number of releases, a whole number >= 0, charged even beyond the target.

        Raises:
            UnsupportedEventError: the event has no accounting rule; nothing was charged.
            ValueError: `event` is not an event, or `count` is negative or not whole; nothing was
                charged.
        """
        count = checks.whole_number("count", count)
        self.max_count(event)  # refuses what has no rule
        if count:
            self._charge(event, count)
            self._event = None

    def _charge(self, event: Event, count: int) -> None:
        self._budget.counts[event] += count
        self._ledger.record(event, count)


def _orders(accountant: AccountantChoice | None, order: float | None) -> tuple[float, ...]:
    """Return the Rényi orders from which an adaptive filter chooses one."""
    if order is not None:
        return (order,)
    return accountant.orders if isinstance(accountant, RdpOrders) else DEFAULT_ORDERS


def _require_rdp(accountant: AccountantChoice | None) -> None:
    if accountant in (None, "rdp") or isinstance(accountant, RdpOrders):
        return
    reason = "is not a Rényi filter"
    if accountant == "pld":
        reason = (
            "stops by a composed privacy loss distribution, which is not a valid rule when the "
            "parameters may depend on earlier releases (arXiv:2602.06756)"
        )
    raise ValueError(
        f"mode='adaptive' cannot be combined with accountant={accountant!r}: it {reason}; use "
        "accountant='rdp', or mode='fixed_schedule' if the schedule is fixed in advance"
    )
