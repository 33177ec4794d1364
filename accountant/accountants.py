"""Privacy accountants, which compose privacy events and return the (epsilon, delta) of all of them.

An accountant breaks each event down into mechanisms, such as a sampled Gaussian, and counts the
runs of each mechanism. Epsilon is computed from these counts on request. So it does not depend on
the order of the events.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, final

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.composition import Mechanism, UnsupportedEventError, break_down, sort_steps
from fedsim.accountant.events import Adjacency, Event, append_event, check_adjacency
from fedsim.accountant.pld.distribution import pld_delta, pld_epsilon
from fedsim.accountant.pld.privacy_profile import (
    composed_delta,
    composed_epsilon,
    exactly_composable,
)
from fedsim.accountant.rdp.conversion import (
    ConversionName,
    check_conversion,
    delta_from_rdp,
    epsilon_from_rdp,
)
from fedsim.accountant.rdp.curves import leak, total_rdp
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, check_orders

__all__ = [
    "Accountant",
    "AccountantChoice",
    "AccountantName",
    "MomentsAccountant",
    "PldAccountant",
    "PrivacySpent",
    "RdpAccountant",
    "RdpOrders",
    "UnsupportedEventError",
    "accountant_name",
    "choose_accountant",
    "make_accountant",
    "renyi_choice",
]

AccountantName = Literal["pld", "rdp", "moments"]

_MOMENTS_ORDERS = tuple(float(order) for order in range(2, 33))  # the moments lambda = 1 ... 31


@dataclass(frozen=True)
class RdpOrders:
    """Choice of the Rényi accountant with given orders, to pass in place of an accountant's name.

    Attributes:
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: there are no orders, or one is outside (1, 65536].
    """

    orders: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", check_orders(tuple(self.orders)))

    def __str__(self) -> str:
        return f"rdp at orders {', '.join(f'{order:g}' for order in self.orders)}"


AccountantChoice = AccountantName | RdpOrders
"""The name of an accountant, or the Rényi accountant with chosen orders."""


class PrivacySpent(NamedTuple):
    """The (epsilon, delta) of all events that an accountant composed.

    Attributes:
        epsilon: the epsilon, >= 0; infinite after a release without a guarantee.
        delta: the delta at which epsilon holds.
        best_order: the Rényi order that gives epsilon; None from the PLD accountant, and if epsilon
            follows without an order (0, infinite or composed exactly).
    """

    epsilon: float
    delta: float
    best_order: float | None


class Accountant(ABC):
    """Base class of the accountants, which compose events into one (epsilon, delta).

    Guarantee: all composed events are jointly (get_epsilon(delta), delta)-DP for every delta, under
    the accountant's adjacency. The noise has standard deviation z C, with noise multiplier z and
    clipping norm C of one example. The composition is adaptive: later releases may depend on
    earlier ones, but every sampling rate and noise multiplier must be fixed without looking at
    them.

    Adjacency (see `fedsim.accountant.events`): zero-out and add-remove both have L2 sensitivity C.
    They give the same epsilon for Gaussian, JointGaussian, PoissonSampled and RandomAllocation
    events; replace-one has sensitivity 2 C. FixedSizeSampled needs replace-one, and EpochShuffled
    needs zero-out or replace-one; they are refused under other adjacencies.

    Edge cases: an accountant without events has epsilon 0; NonPrivate, or noise multiplier 0 with a
    sampling rate above 0, gives epsilon infinity and delta 1.

    Args:
        adjacency: "zero_out", "add_remove" or "replace_one".

    Raises:
        ValueError: there is no such adjacency.
    """

    def __init__(self, *, adjacency: Adjacency = "zero_out") -> None:
        self._adjacency: Adjacency = check_adjacency(adjacency)
        self._history: list[tuple[Event, int]] = []
        self._steps: Counter[Mechanism] = Counter()
        self._non_private = False
        self._last: dict[tuple[str, float], tuple[float, float | None]] = {}

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring data sets that the guarantee covers; fixed at construction."""
        return self._adjacency

    @property
    def history(self) -> tuple[tuple[Event, int], ...]:
        """Composed events in order, as pairs (event, count); equal events in a row share a pair."""
        return tuple(self._history)

    @property
    def steps(self) -> Mapping[Mechanism, int]:
        """Number of runs of each mechanism in the composed events, as a copied mapping.

        Epsilon depends on these numbers alone.
        """
        return dict(self._steps)

    @final
    def compose(self, event: Event, count: int = 1) -> Self:
        """Add `count` releases of `event` and return the accountant itself.

        Args:
            event: the release to add.
            count: number of releases, a whole number >= 0.

        Raises:
            UnsupportedEventError: the event, or one inside it, has no accounting rule under this
                adjacency; nothing was added.
            ValueError: `count` is negative or not whole; nothing was added.
        """
        count = checks.whole_number("count", count)
        breakdown = break_down(event, count, self._adjacency)
        self._steps.update(breakdown.steps)
        self._non_private |= breakdown.non_private
        append_event(self._history, event, count)
        self._last.clear()
        return self

    @final
    def get_epsilon(self, delta: float) -> float:
        """Return the epsilon of all composed events at `delta`.

        Raises:
            ValueError: `delta` is not in (0, 1).

        Example:
            >>> from fedsim.accountant import Gaussian, PldAccountant
            >>> round(PldAccountant().compose(Gaussian(1.0)).get_epsilon(delta=1e-5), 3)
            4.377
        """
        return self.get_privacy_spent(delta).epsilon

    @final
    def get_privacy_spent(self, delta: float) -> PrivacySpent:
        """Return the epsilon of all composed events at `delta`, and the Rényi order that gives it.

        Raises:
            ValueError: `delta` is not in (0, 1).
        """
        delta = checks.open_probability("delta", delta)
        if self._non_private:
            return PrivacySpent(math.inf, delta, None)
        if not self._steps:
            return PrivacySpent(0.0, delta, None)
        key = ("epsilon", delta)
        if key not in self._last:
            self._last = {key: self._epsilon(delta)}
        epsilon, order = self._last[key]
        return PrivacySpent(epsilon, delta, order)

    @final
    def get_delta(self, epsilon: float) -> float:
        """Return the delta at which all events together are (epsilon, delta)-DP.

        Raises:
            ValueError: `epsilon` is negative or not finite.

        Example:
            >>> from fedsim.accountant import Gaussian, PldAccountant
            >>> round(PldAccountant().compose(Gaussian(1.0)).get_delta(epsilon=1.0), 4)
            0.1269
        """
        epsilon = checks.non_negative("epsilon", epsilon)
        if self._non_private:
            return 1.0
        if not self._steps:
            return 0.0
        key = ("delta", epsilon)
        if key not in self._last:
            self._last = {key: (self._delta(epsilon), None)}
        return self._last[key][0]

    def __repr__(self) -> str:
        settings = {"adjacency": self._adjacency, **self._settings()}
        text = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}({text}, releases={sum(n for _, n in self._history)})"

    def _settings(self) -> dict[str, Any]:
        """Return the settings other than the adjacency that `repr` shows."""
        return {}

    @abstractmethod
    def _epsilon(self, delta: float) -> tuple[float, float | None]:
        """Return (epsilon, best order or None) of `self._steps`, which is not empty."""

    @abstractmethod
    def _delta(self, epsilon: float) -> float:
        """Return delta of `self._steps`, which is not empty."""


class _RenyiAccountant(Accountant):
    """Base of the accountants that add RDP curves."""

    def __init__(
        self, orders: Sequence[float], conversion: ConversionName, adjacency: Adjacency
    ) -> None:
        super().__init__(adjacency=adjacency)
        self.orders = check_orders(tuple(orders))
        self.conversion: ConversionName = check_conversion(conversion)

    @final
    def rdp(self) -> tuple[tuple[float, float], ...]:
        """Return (order, RDP of all events) for each order; RDP is infinite after NonPrivate."""
        if self._non_private:
            return tuple((order, math.inf) for order in self.orders)
        values = self._total().tolist()
        return tuple(zip(self.orders, values, strict=True))

    def _total(self) -> Floats:
        # Sorted: rounding must not depend on the history.
        return total_rdp(sort_steps(self._steps), self.orders)

    def _leak(self) -> float:
        return leak(self._steps.items())

    def _epsilon(self, delta: float) -> tuple[float, float | None]:
        return epsilon_from_rdp(self.orders, self._total(), delta, self.conversion, self._leak())

    def _delta(self, epsilon: float) -> float:
        leaked = self._leak()
        return delta_from_rdp(self.orders, self._total(), epsilon, self.conversion, leaked)[0]


@final
class RdpAccountant(_RenyiAccountant):
    """The Rényi accountant, which adds RDP curves (Mironov 2017, arXiv:1702.07476, Proposition 1).

    Guarantee: all composed events are jointly (epsilon, delta)-DP, as for every `Accountant`.
    Epsilon is an upper bound, typically 8 to 15 % above the exact one. A few EpsilonDelta events
    without other events are composed exactly (`exactly_composable`).

    Args:
        orders: Rényi orders to try, each in (1, 65536]. More orders can only lower epsilon.
        conversion: the conversion from RDP to (epsilon, delta): "tight", or the older "mironov".
        adjacency: "zero_out", "add_remove" or "replace_one".

    Raises:
        ValueError: there are no orders, one is outside (1, 65536], or a name is unknown.

    Example:
        >>> from fedsim.accountant import Gaussian, RdpAccountant
        >>> spent = RdpAccountant().compose(Gaussian(2.0), 4).get_privacy_spent(1e-5)
        >>> round(spent.epsilon, 3), spent.best_order
        (4.729, 5.5)
    """

    def __init__(
        self,
        orders: Sequence[float] = DEFAULT_ORDERS,
        *,
        conversion: ConversionName = "tight",
        adjacency: Adjacency = "zero_out",
    ) -> None:
        super().__init__(orders, conversion, adjacency)

    def _epsilon(self, delta: float) -> tuple[float, float | None]:
        kinds = exactly_composable(self._steps.items())
        return super()._epsilon(delta) if kinds is None else (composed_epsilon(kinds, delta), None)

    def _delta(self, epsilon: float) -> float:
        kinds = exactly_composable(self._steps.items())
        return super()._delta(epsilon) if kinds is None else composed_delta(kinds, epsilon)

    def _settings(self) -> dict[str, Any]:
        return {"conversion": self.conversion, "orders": len(self.orders)}


@final
class MomentsAccountant(_RenyiAccountant):
    """The moments accountant as published (Abadi et al. 2016, arXiv:1607.00133), for comparison.

    The accountant adds up the log moments lambda = 1 ... 31, which are lambda times the RDP at the
    integer orders 2 ... 32. Epsilon is then the minimum over lambda of (moments + log(1/delta)) /
    lambda.

    Guarantee: all composed events are jointly (epsilon, delta)-DP, as for every `Accountant`.
    Epsilon is an upper bound, never below that of `RdpAccountant`, and far above it where epsilon
    is very small or very large.

    Args:
        adjacency: "zero_out", "add_remove" or "replace_one".

    Example:
        >>> from fedsim.accountant import Gaussian, MomentsAccountant, PoissonSampled
        >>> step = PoissonSampled(0.01, Gaussian(4.0))
        >>> round(MomentsAccountant().compose(step, 1000).get_epsilon(1e-5), 3)
        0.477
    """

    def __init__(self, *, adjacency: Adjacency = "zero_out") -> None:
        super().__init__(_MOMENTS_ORDERS, "mironov", adjacency)


@final
class PldAccountant(Accountant):
    """The privacy loss distribution accountant: exact up to numerics, never below the exact value.

    Guarantee: all composed events are jointly (epsilon, delta)-DP, as for every `Accountant`. In
    ordinary settings epsilon is at most 1e-3 above the exact value (see
    `fedsim.accountant.pld.distribution` for the method and its limits). For FixedSizeSampled events
    the exact value is that of the composed dominating pairs; possibly no data set attains it. If
    any composed event is ZCDP or RepeatAndSelect, RDP is used for all events.

    Example:
        >>> from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled
        >>> accountant = PldAccountant().compose(PoissonSampled(0.01, Gaussian(1.0)), 10_000)
        >>> round(accountant.get_epsilon(1e-5), 3)
        6.188
    """

    def _epsilon(self, delta: float) -> tuple[float, float | None]:
        return pld_epsilon(self._steps, delta), None

    def _delta(self, epsilon: float) -> float:
        return pld_delta(self._steps, epsilon)


_ACCOUNTANTS: dict[str, type[RdpAccountant] | type[PldAccountant] | type[MomentsAccountant]] = {
    "moments": MomentsAccountant,
    "pld": PldAccountant,
    "rdp": RdpAccountant,
}


def choose_accountant(
    name: AccountantName, orders: Sequence[float] | None = None
) -> AccountantChoice:
    """Return the accountant to pass in calls: `name`, or `RdpOrders` if `orders` are given.

    Args:
        name: "pld", "rdp" or "moments".
        orders: Rényi orders, each in (1, 65536], for "rdp" only; None keeps the default orders.

    Raises:
        ValueError: an order is outside its range, or orders are given for "pld" or "moments".
    """
    if orders is None:
        return name
    if name != "rdp":
        raise ValueError(f"orders belong to accountant rdp, got accountant {name}")
    return RdpOrders(tuple(orders))


def accountant_name(accountant: AccountantChoice) -> AccountantName:
    """Return the name of an accountant that is given by name or by `RdpOrders`."""
    return "rdp" if isinstance(accountant, RdpOrders) else accountant


def renyi_choice(accountant: AccountantChoice) -> AccountantChoice:
    """Return the Rényi accountant to use: `accountant` if it is an `RdpOrders`, otherwise "rdp"."""
    return accountant if isinstance(accountant, RdpOrders) else "rdp"


def make_accountant(
    name: AccountantChoice = "pld", *, adjacency: Adjacency = "zero_out"
) -> Accountant:
    """Return a new accountant, chosen by its name or by `RdpOrders`.

    Args:
        name: "pld", "rdp" or "moments", or `RdpOrders`.
        adjacency: "zero_out", "add_remove" or "replace_one".

    Raises:
        ValueError: `name` is not an accountant, or `adjacency` not an adjacency.

    Example:
        >>> from fedsim.accountant import make_accountant
        >>> type(make_accountant("rdp", adjacency="replace_one")).__name__
        'RdpAccountant'
    """
    if isinstance(name, RdpOrders):
        return RdpAccountant(name.orders, adjacency=adjacency)
    if name not in _ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {sorted(_ACCOUNTANTS)}, got {name!r}")
    return _ACCOUNTANTS[name](adjacency=adjacency)
