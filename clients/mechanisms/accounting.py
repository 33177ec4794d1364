"""Accounting of a client: δ, accountant and adjacency, with which ε follows from its charges."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from fedsim.accountant import make_accountant
from fedsim.accountant.accountants import AccountantChoice
from fedsim.accountant.events import Adjacency, Event
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.clients.privacy_settings import PrivacySettings


@dataclass(frozen=True)
class Accounting:
    """How a client's ε is computed from the privacy events that it was charged for.

    Attributes:
        delta: δ at which ε is computed, in (0, 1).
        accountant: the accountant that computes ε.
        adjacency: which data sets are neighbours.
    """

    delta: float
    accountant: AccountantChoice = "pld"
    adjacency: Adjacency = "zero_out"

    @classmethod
    def of(cls, privacy: PrivacySettings, delta: float) -> Self:
        """Return the accounting of a client by its privacy settings, at its δ."""
        return cls(delta, privacy.accounting, privacy.adjacency.name)

    def epsilon(self, charges: Iterable[tuple[Event, int]]) -> float:
        """Return ε of some releases, including the small cost of inexact noise samplers.

        Args:
            charges: pairs (privacy event, number of releases), as one observer sees them.

        Raises:
            UnsupportedEventError: the accountant has no rule for an event.
        """
        return _epsilon(self, tuple(charges))


@lru_cache(maxsize=4096)  # clients of equal size and budget share the result
def _epsilon(accounting: Accounting, charges: tuple[tuple[Event, int], ...]) -> float:
    account = make_accountant(accounting.accountant, adjacency=accounting.adjacency)
    for event, count in charges:
        account.compose(event, count)
    return epsilon_with_slack(account.get_epsilon, accounting.delta)
