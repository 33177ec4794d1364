"""Certificates of a federation: one for each observer, from ledgers of one run.

A certificate is an ε at a δ against one observer. Local trust has one against the server, which
sees single uploads. Distributed trust has two: against an observer of sums, and against a server
that sees single uploads, which only the client's own share of the noise hides. Central trust has
one against an observer of global models. Certificates of different observers or units are never
added, averaged or compared.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from fedsim.accountant.events import Event, Gaussian, JointGaussian
from fedsim.accountant.ledger.privacy_ledger import PrivacyLedger

Trust = Literal["local", "distributed", "central"]
Unit = Literal["example", "client"]
Observer = Literal["server", "sums", "models"]

OBSERVERS: Mapping[str, tuple[Observer, ...]] = {
    "local": ("server",),
    "distributed": ("sums", "server"),
    "central": ("models",),
}
"""Observers of each trust model; the claimed view is the first."""

_ROUNDED = 1e-9  # relative: square roots and the noise of groups


def adjacency_objection(adjacency: str, *, trust: str, protects_client: bool) -> str | None:
    """Return what tells neighbours apart beside charged releases; None: nothing does.

    Under add_remove nothing public may follow from the unit. Of whole clients, their number sets
    the rate of draws, the largest of their noises is that of a sum, and every record names each
    one; `zero_out` has the same events, and says that the list of clients is public. The noise of a
    sum of examples is set by all clients' sizes.

    Args:
        adjacency: of the claim.
        trust: the trust model.
        protects_client: whether one ε is for everything that a client has.
    """
    if adjacency != "add_remove":
        return None
    if protects_client:
        return (
            "under add_remove a client would be there or not, and the rate of draws, the noise of "
            "a sum and the records follow from the list of clients"
        )
    if trust != "local":
        return (
            f"trust: {trust} needs public client sizes, which set every client's noise, and "
            "add_remove keeps them private"
        )
    return None


def is_explained_by_shares(claimed: PrivacyLedger, own: PrivacyLedger, *, honest: int) -> bool:
    """Whether a ledger against sums follows from the shares in the ledger against the server.

    The noise of h honest clients with equal shares is √h times one share. So each claimed noise
    multiplier may be at most √h times that of the client's own share in the same release.

    Args:
        claimed: ledger of a client against an observer of sums.
        own: its ledger against a server that sees its uploads.
        honest: h, the fewest honest clients of a sum that is opened, >= 1.
    """
    factor = math.sqrt(honest) * (1.0 + _ROUNDED)
    return len(claimed) == len(own) and all(
        count == other and _is_explained(event, share, factor)
        for (event, count), (share, other) in zip(claimed.entries, own.entries, strict=True)
    )


def _is_explained(claimed: Event, own: Event, factor: float) -> bool:
    if isinstance(claimed, Gaussian) and isinstance(own, Gaussian):
        return claimed.noise_multiplier <= own.noise_multiplier * factor
    if isinstance(claimed, JointGaussian) and isinstance(own, JointGaussian):
        pairs = list(zip(claimed.noise_multipliers, own.noise_multipliers, strict=False))
        same = len(claimed.noise_multipliers) == len(own.noise_multipliers)
        return same and all(noise <= share * factor for noise, share in pairs)
    inner, share = getattr(claimed, "event", None), getattr(own, "event", None)
    if not isinstance(inner, Event) or not isinstance(share, Event):
        return False
    return replace(cast(Any, claimed), event=share) == own and _is_explained(inner, share, factor)
