"""Bounds on the ε of repeated steps, from basic composition to the PLD accountant, to compare.

Basic, strong, KOV (Kairouz, Oh, Viswanath) and optimal composition use one (epsilon, delta) pair
per step. The pair is the exact one of a Gaussian release about the batch, reduced by amplification
by sampling. The total delta is split between the steps and the composition theorem so that epsilon
is smallest. The moments accountant and Rényi DP use the Rényi curve of a step. The PLD accountant
uses the step's whole privacy loss distribution.

References:
    Dwork, Roth 2014, The Algorithmic Foundations of Differential Privacy, Theorems 3.16 and 3.20.
    Kairouz, Oh, Viswanath 2015, arXiv:1311.0776 (KOV), Theorems 3.3 and 3.4.
    Abadi et al. 2016, arXiv:1607.00133: figure 2 compares moments with strong composition.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.accountants import AccountantChoice, choose_accountant, make_accountant
from fedsim.accountant.composition import (
    FixedSizeGaussian,
    SampledGaussian,
    UnsupportedEventError,
    break_down,
)
from fedsim.accountant.events import Adjacency, Event
from fedsim.accountant.pld.privacy_profile import gaussian_epsilon
from fedsim.accountant.textbook.classical import (
    advanced_composition,
    basic_composition,
    kov_composition,
    optimal_composition,
    subsample_amplification,
)
from fedsim.core.errors import InputError

Charges = Sequence[tuple[Event, int]]
Compose = Callable[[float, float, int, float], float]

# Candidate shares of delta for the steps; the theorem's slack gets the rest.
_SHARES = (*np.logspace(-9, -1, 17).tolist(), 0.3, 0.5, 0.7, 0.9, 0.999)
_MAX_STEP_DELTA = 0.999


@dataclass(frozen=True)
class Bound(ABC):
    """A method that computes an upper bound on the ε of a given list of releases.

    Attributes:
        name: the bound's name in commands, such as `strong`.
        label: the bound's name in tables and plots.
        description: a short description of the bound.
    """

    name: str
    label: str
    description: str

    @abstractmethod
    def epsilon(
        self, charges: Charges, delta: float, adjacency: Adjacency = "zero_out"
    ) -> float | None:
        """Return the bound on ε at `delta` of all releases; None if the method does not cover them.

        Guarantee: the releases are jointly (result, delta)-DP under `adjacency`.

        Args:
            charges: pairs (event, number of releases).
            delta: in (0, 1).
            adjacency: "zero_out", "add_remove" or "replace_one".

        Raises:
            ValueError: an argument is outside its range.
        """


@dataclass(frozen=True)
class PairBound(Bound):
    """A bound for equal steps, each of which is described by the same (epsilon, delta) pair.

    It covers Gaussian steps with equal noise and equal sampling: Poisson sampling under zero-out
    and add-remove, sampling without replacement under replace-one, or no sampling.

    Attributes:
        compose: function of (epsilon, delta, count, total delta) that returns the composition's ε.
    """

    compose: Compose

    def epsilon(
        self, charges: Charges, delta: float, adjacency: Adjacency = "zero_out"
    ) -> float | None:
        """Return the smallest ε over ways to split δ between the steps and the composition theorem.

        The result is None if the steps are unequal or not covered.
        """
        delta, counts = checks.open_probability("delta", delta), dict[tuple[float, float], int]()
        for event, count in charges:
            try:
                breakdown = break_down(event, count, adjacency)
            except UnsupportedEventError:
                return None
            if breakdown.non_private:
                return math.inf
            for mechanism, number in breakdown.steps.items():
                match mechanism:
                    case SampledGaussian():
                        step = mechanism.sampling_rate, 1.0 / mechanism.noise_multiplier
                    case FixedSizeGaussian():  # replace-one: the sensitivity is 2 C
                        step = mechanism.sampling_rate, 2.0 / mechanism.noise_multiplier
                    case _:
                        return None
                counts[step] = counts.get(step, 0) + number
        if not counts:
            return 0.0
        if len(counts) > 1:
            return None
        ((rate, mu), number), *_ = counts.items()
        return min(self._at(share, rate, mu, number, delta) for share in _SHARES)

    def _at(self, share: float, rate: float, mu: float, count: int, delta: float) -> float:
        step_delta = min(_MAX_STEP_DELTA, share * delta / (count * rate))
        pair = subsample_amplification(gaussian_epsilon(mu, step_delta), step_delta, rate)
        return self.compose(*pair, count, delta)


@dataclass(frozen=True)
class AccountantBound(Bound):
    """A bound whose ε is computed by one of fedsim's accountants.

    Attributes:
        accountant: the accountant's name, or `RdpOrders`.
    """

    accountant: AccountantChoice

    def epsilon(
        self, charges: Charges, delta: float, adjacency: Adjacency = "zero_out"
    ) -> float | None:
        """Return the ε of all releases by the accountant; None if a release has no rule there."""
        account = make_accountant(self.accountant, adjacency=adjacency)
        try:
            for event, count in charges:
                account.compose(event, count)
        except UnsupportedEventError:
            return None
        return account.get_epsilon(delta)


def choose_bounds(
    names: Sequence[str] | None = None, *, orders: Sequence[float] | None = None
) -> tuple[Bound, ...]:
    """Return the bounds that have the given names, in the order of the names.

    Args:
        names: keys of `BOUNDS`; by default `USUAL_BOUNDS`.
        orders: Rényi orders of the bound `rdp`, each in (1, 65536]; None keeps the default orders.

    Raises:
        InputError: a name is unknown or given twice.
        ValueError: an order is outside its range.
    """
    chosen = USUAL_BOUNDS if names is None else tuple(names)
    for place, name in enumerate(chosen):
        if name not in BOUNDS:
            raise InputError(f"there is no bound {name!r}; there are {', '.join(BOUNDS)}")
        if name in chosen[:place]:
            raise InputError(f"bound {name} is given twice")
    rdp_choice = choose_accountant("rdp", orders)
    return tuple(
        replace(bound, accountant=rdp_choice)
        if isinstance(bound, AccountantBound) and name == "rdp"
        else bound
        for name, bound in ((name, BOUNDS[name]) for name in chosen)
    )


def _basic(epsilon: float, delta: float, count: int, total_delta: float) -> float:
    """Return the sum of epsilons, or infinity if the sum of deltas exceeds `total_delta`."""
    (total_epsilon, spent) = basic_composition([count * epsilon], [min(1.0, count * delta)])
    return total_epsilon if spent <= total_delta else math.inf


def _strong(epsilon: float, delta: float, count: int, total_delta: float) -> float:
    """Return ε by strong composition, with the rest of `total_delta` as slack."""
    slack = total_delta - count * delta
    return advanced_composition(epsilon, delta, count, slack)[0] if slack > 0.0 else math.inf


def _kov(epsilon: float, delta: float, count: int, total_delta: float) -> float:
    """Return ε by KOV Theorem 3.4, with the slack for which 1 - (1-delta)^T (1-slack) = total."""
    slack = -math.expm1(math.log1p(-total_delta) - count * math.log1p(-delta))
    return kov_composition(epsilon, delta, count, slack)[0] if slack > 0.0 else math.inf


BOUNDS: dict[str, Bound] = {
    bound.name: bound
    for bound in (
        PairBound("basic", "basic", "sum of the steps' ε and δ", _basic),
        PairBound("strong", "strong", "strong composition (Dwork et al. 2010)", _strong),
        PairBound("kov", "KOV", "smallest branch of KOV Theorem 3.4", _kov),
        PairBound(
            "optimal", "optimal", "optimal for (ε, δ) pairs (KOV Thm 3.3)", optimal_composition
        ),
        AccountantBound("moments", "moments", "moments accountant (Abadi et al. 2016)", "moments"),
        AccountantBound("rdp", "RDP", "Rényi DP (Mironov 2017), tight conversion", "rdp"),
        AccountantBound("pld", "PLD", "privacy loss distributions, numerically exact", "pld"),
    )
}
"""Every bound by its name: classical bounds first, the tightest bound last."""

USUAL_BOUNDS = ("basic", "strong", "moments", "rdp", "pld")
