"""Whom a node trusts, and which of a charge's two ledgers its budget counts.

A budget holds against everybody whom the node does not trust. A node that trusts less than an
experiment's claim needs counts what holds without that trust: the client's own noise.
"""

from typing import Literal

from fedsim.accountant import NonPrivate
from fedsim.deployment.data_budget import Releases

Trust = Literal["local", "distributed", "central"]
_ORDER: tuple[Trust, ...] = ("local", "distributed", "central")


def suffices(given: Trust, needed: Trust) -> bool:
    """Whether a node's trust covers what the claim of an experiment needs.

    Args:
        given: `trust` of the node's policy.
        needed: `privacy.trust` of the experiment.
    """
    return _ORDER.index(given) >= _ORDER.index(needed)


def counted_releases(
    claimed: Releases, against_server: Releases | None, *, given: Trust, needed: Trust
) -> Releases:
    """Return the releases that count for a node.

    Args:
        claimed: (event, number of releases) in the view of the experiment's claim.
        against_server: the same against whoever sees the client's own upload; None where that is
            `claimed`, or no noise protects from it.
        given: `trust` of the node's policy.
        needed: `privacy.trust` of the experiment.
    """
    if suffices(given, needed):
        return claimed
    return [(NonPrivate(), 1)] if against_server is None else against_server
