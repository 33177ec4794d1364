"""Trust models: which adversaries a privacy guarantee names, and each client's share of the noise.

A certificate states an ε at a δ against one adversary. Local trust has one certificate, against a
server that sees single uploads. Distributed trust has two certificates. One is against an adversary
that sees sums of uploads. The other is against a server that sees single uploads, each hidden only
by the noise of its sender. Central trust has one certificate, against an adversary that sees global
models. Certificates against different adversaries or privacy units (example, client) are never
added, averaged or compared.

Under distributed trust, the noise in every sum that is opened must hide each client. Client j of a
round has weight a_j and adds N(0, (a_j s_j)² I) to its upload. The adversary sees only sums of at
least m uploads. Of these, t may come from clients that collude with it, or add no noise. The other
h = m - t are honest. One unit (an example or the whole client) of client k moves its upload by at
most a_k C_k. So against the sum client k has the noise multiplier

    sqrt(Σ_{j honest} (a_j s_j)²) / (a_k C_k).

With equal a_j s_j = R / √h this is R / (a_k C_k), where R is the standard deviation of the honest
clients' noise together. If the budget of client k requires the noise multiplier z_k, then
R >= a_k C_k z_k. So the client with the largest a_k C_k z_k sets the noise of all. Theorem, proof
and conditions: docs/explain/trust_models.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from fedsim.accountant import checks
from fedsim.accountant.events import Event, Gaussian, JointGaussian
from fedsim.accountant.ledger.privacy_ledger import PrivacyLedger, events_match

Trust = Literal["local", "distributed", "central"]
Unit = Literal["example", "client"]
Observer = Literal["server", "sums", "models"]

OBSERVERS: Mapping[str, tuple[Observer, ...]] = {
    "local": ("server",),
    "distributed": ("sums", "server"),
    "central": ("models",),
}
"""The adversaries of each trust model, by its name; ε is claimed against the first one."""

CLAIMED_AGAINST: Mapping[str, Observer] = {trust: seen[0] for trust, seen in OBSERVERS.items()}
"""The adversary against which ε is claimed, by trust model."""

_ROUNDED = 1e-9  # relative: square roots and the noise of groups


def is_explained_by_shares(
    claimed: PrivacyLedger, server_ledger: PrivacyLedger, *, honest: int
) -> bool:
    """Whether a client adds enough noise for the noise multipliers that it claims in sums.

    The joint noise of h honest clients with equal shares is √h times one share. So each claimed
    noise multiplier may be at most √h times the multiplier of the client's own noise in the same
    release.

    Args:
        claimed: ledger of a client against an adversary that sees sums.
        server_ledger: ledger of the same client against a server that sees its uploads.
        honest: h, the fewest honest clients in a sum that the server opens, >= 1.
    """
    is_explained = partial(_is_explained, factor=math.sqrt(honest) * (1.0 + _ROUNDED))
    return events_match(claimed.entries, server_ledger.entries, is_explained)


def _is_explained(claimed: Event, server_event: Event, *, factor: float) -> bool:
    if isinstance(claimed, Gaussian) and isinstance(server_event, Gaussian):
        return claimed.noise_multiplier <= server_event.noise_multiplier * factor
    if isinstance(claimed, JointGaussian) and isinstance(server_event, JointGaussian):
        noises, shares = claimed.noise_multipliers, server_event.noise_multipliers
        return len(noises) == len(shares) and all(
            noise <= share * factor for noise, share in zip(noises, shares, strict=True)
        )
    return False


_ROUNDED_UP = 1.0 + 2.0**-40  # more than a few operations round down


@dataclass(frozen=True)
class NoiseNeed:
    """The noise that one client needs in a sum of uploads.

    Attributes:
        scale: largest change a_k C_k (weight times clipping norm) of the client's upload by one
            privacy unit (an example, or all data of the client); 0 for a client that sends nothing.
        against_sums: noise multiplier z_k that the client claims against an adversary that sees
            only sums.
        against_server: noise multiplier that the client claims against a server that sees its
            upload; 0 for a client without such a claim.
    """

    scale: float
    against_sums: float
    against_server: float = 0.0


@dataclass(frozen=True)
class NoiseShares:
    """The equal amounts of noise of all clients, which together protect the sum of the uploads.

    Attributes:
        share: standard deviation of the noise in one client's upload.
        honest: h, the fewest honest clients in a sum that the server opens.
    """

    share: float
    honest: int

    @classmethod
    def meeting(
        cls, needs: Sequence[NoiseNeed], *, min_clients: int, colluding_clients: int
    ) -> "NoiseShares":
        """Return the smallest equal shares of noise that meet the need of every client.

        A client may need noise in sums of uploads, in single uploads, or in both.

        Args:
            needs: the noise that each client needs.
            min_clients: m, the fewest clients in a sum that the server opens.
            colluding_clients: t, the number of clients in the sum that may collude with the
                adversary or add no noise.

        Raises:
            ValueError: no honest client would be left, or a need is not a finite number >= 0.
        """
        honest = honest_clients(min_clients=min_clients, colluding_clients=colluding_clients)
        share = 0.0
        for need in needs:
            scale = checks.non_negative("scale", need.scale)
            sums = checks.non_negative("against_sums", need.against_sums)
            server = checks.non_negative("against_server", need.against_server)
            share = max(share, scale * sums / math.sqrt(honest), scale * server)
        return cls(share * _ROUNDED_UP, honest)

    def own_multiplier(self, scale: float) -> float:
        """Return the noise multiplier of a single upload, which has only its sender's noise.

        Args:
            scale: largest change a_k C_k (weight times clipping norm) of the upload by one privacy
                unit (an example, or all data of the client).
        """
        return self.share / checks.positive("scale", scale)


def honest_clients(*, min_clients: int, colluding_clients: int) -> int:
    """Return h = m - t, the fewest honest clients in a sum that the server opens.

    Args:
        min_clients: m, the fewest clients in a sum that the server opens.
        colluding_clients: t, the number of clients in the sum that may collude with the adversary
            or add no noise.

    Raises:
        ValueError: no honest client would be left.
    """
    honest = min_clients - colluding_clients
    if colluding_clients < 0 or honest < 1:
        raise ValueError(
            f"of min_clients = {min_clients} clients {colluding_clients} may collude, which leaves "
            f"{honest} honest ones; at least 1 is needed: raise min_clients or lower "
            "colluding_clients"
        )
    return honest
