"""The privacy budget of a node's data: which releases it covers, given whom the node trusts.

A server may choose each experiment after it saw the answers to the earlier ones. The ε of an
ordinary accountant does not hold for such choices, so rules for adaptive choices are used. A
release is granted if one of these rules grants it:

| rule                                                                     | share of δ |
|--------------------------------------------------------------------------|------------|
| all releases are of the same event, and their ε by PLD is in the budget  | 1/2        |
| Rényi filter at the order that affords most Gaussian releases            | 1/4        |
| Rényi filter at three quarters of that order, better for sampled events  | 1/4        |

Each rule alone is a privacy filter: if it grants all releases, they are (ε, δ')-DP, where δ' is the
rule's share of δ. The first rule is one since the event is chosen before any answer, and only the
number of releases depends on answers. The others are by Feldman, Zrnic 2021 (arXiv:2008.11193). A
rule that grants a release also granted all releases before it, so the rule that grants the last
release covers all of them. Which rule that is may depend on answers, so the δ of all releases is
bounded by the sum of all shares.

The budget holds against everybody whom the node does not trust. If an experiment's ε relies on more
trust than the node has, the node counts the ε that the client's own noise gives without that trust.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from fedsim.accountant import Event, NonPrivate, PrivacyFilter
from fedsim.accountant.events import Adjacency
from fedsim.accountant.sampler_slack import target_without_slack
from fedsim.accountant.trust import Trust

Releases = Sequence[tuple[Event, int]]


def count_affordable(
    spent: Mapping[Event, int],
    wanted: Releases,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "zero_out",
) -> int:
    """Return how many of the wanted releases a budget covers after earlier spending.

    Guarantee: all releases that this function grants over time are together (epsilon, delta)-DP
    under the adjacency, however a server chooses them.

    Args:
        spent: number of earlier releases by event.
        wanted: pairs (event, number of releases), in the order of the releases.
        epsilon: ε of the budget, > 0.
        delta: δ of the budget, in (0, 1).
        adjacency: adjacency of all releases.

    Raises:
        UnsupportedEventError: an event has no privacy bound under the adjacency.
    """
    try:
        epsilon, delta = target_without_slack(epsilon, delta)
    except ValueError:  # the sampler's slack alone is more
        return 0
    events = {*spent, *(event for event, _ in wanted)}
    filters = list(_renyi_filters(epsilon, delta, adjacency))
    if len(events) == 1:
        filters.append(PrivacyFilter(epsilon, delta / 2, adjacency=adjacency))
    return max((_count_granted(budget, spent, wanted) for budget in filters), default=0)


def affords_anything(epsilon: float, delta: float) -> bool:
    """Return whether a budget can cover at least one release that has enough noise.

    Args:
        epsilon: ε of the budget, > 0.
        delta: δ of the budget, in (0, 1).
    """
    return any(_renyi_filters(epsilon, delta, "zero_out"))


def _renyi_filters(epsilon: float, delta: float, adjacency: Adjacency) -> Iterator[PrivacyFilter]:
    order: float | None = None
    for share in (1.0, 0.75):
        try:
            privacy_filter = PrivacyFilter(
                epsilon,
                delta / 4,
                mode="adaptive",
                order=None if order is None else order * share,
                adjacency=adjacency,
            )
        except ValueError:  # the order leaves no budget at this ε and δ
            return
        order = privacy_filter.order
        yield privacy_filter


def _count_granted(budget: PrivacyFilter, spent: Mapping[Event, int], wanted: Releases) -> int:
    for event, count in spent.items():
        budget.record(event, count)
    total = 0
    for event, count in wanted:
        granted = budget.request(event, count)
        total += granted
        if granted < count:
            break
    return total


def suffices(given: Trust, needed: Trust) -> bool:
    """Return whether a node trusts all parties that an experiment's ε relies on.

    Args:
        given: `trust` of the node's policy.
        needed: `privacy.trust` of the experiment.
    """
    order = get_args(Trust)  # from the least trust
    return order.index(given) >= order.index(needed)


def counted_releases(
    claimed: Releases, against_server: Releases | None, *, given: Trust, needed: Trust
) -> Releases:
    """Return pairs (event, number of releases) that count against a node's privacy budget.

    Args:
        claimed: pairs (event, number of releases) that give the experiment's ε.
        against_server: such pairs that give the ε against an adversary who sees the client's own
            upload. None if these pairs equal `claimed`, or if no noise protects the upload.
        given: `trust` of the node's policy.
        needed: `privacy.trust` of the experiment.
    """
    if suffices(given, needed):
        return claimed
    return [(NonPrivate(), 1)] if against_server is None else against_server
