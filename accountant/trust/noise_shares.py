"""Shares of noise: how much each client adds, so that every sum that is opened hides each of them.

Client j of a round adds N(0, (a_j s_j)² I) to its part of a sum. Only the sum is seen, and only if
it has at least m parts. Of these, t may come from clients that collude with the observer, or add no
noise. The other h = m - t are honest. One unit of client k moves its part by at most a_k C_k, so
against the sum client k has the noise multiplier

    sqrt(Σ_{j honest} (a_j s_j)²) / (a_k C_k).

With equal a_j s_j = R / √h this is R / (a_k C_k), and client k needs R >= a_k C_k z_k for the
multiplier z_k of its budget. So the client with the largest need sets the noise of all. Theorem,
proof and conditions: docs/trust_models.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.accountant import checks

_ROUNDED_UP = 1.0 + 2.0**-40  # more than a few operations round down


@dataclass(frozen=True)
class NoiseNeed:
    """The noise that one client needs in a sum.

    Attributes:
        scale: a_k C_k, by how much one unit of the client moves its part of the sum; 0 for a client
            that sends nothing.
        against_sums: z_k, the noise multiplier of its claim against whoever sees sums.
        against_server: noise multiplier of its claim against whoever sees its part; 0: none.
    """

    scale: float
    against_sums: float
    against_server: float = 0.0


@dataclass(frozen=True)
class NoiseShares:
    """Equal shares of noise in a sum.

    Attributes:
        share: R / √h, standard deviation of one client's noise in its part of the sum.
        honest: h, the fewest honest clients in a sum that is opened.
    """

    share: float
    honest: int

    @classmethod
    def meeting(
        cls, needs: Sequence[NoiseNeed], *, min_clients: int, colluding_clients: int
    ) -> "NoiseShares":
        """Return the smallest equal shares that meet every need.

        Args:
            needs: the need of each client.
            min_clients: m, the fewest clients whose sum is ever opened.
            colluding_clients: t, how many of them may collude with the observer, or add no noise.

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
        """Return the noise multiplier of a client's own share, against whoever sees its part."""
        return self.share / checks.positive("scale", scale)


def honest_clients(*, min_clients: int, colluding_clients: int) -> int:
    """Return h = m - t.

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
