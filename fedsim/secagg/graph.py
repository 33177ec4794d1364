"""The graph of clients that share pairwise masks: complete (SecAgg) or sparse (SecAgg+).

Source: Bell, Bonawitz, Gascón, Lepoint, Raykova 2020, "Secure single-server aggregation with
(poly)logarithmic overhead". The numbers of neighbours and shares follow the conditions in section
3. The sparse graph is a Harary graph in which the clients have random positions.
"""

import logging
import math
import secrets
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from fedsim.secagg.errors import ThresholdError
from fedsim.secagg.settings import SecAggPlusSettings, SecAggSettings, SecureAggregationSettings

logger = logging.getLogger(__name__)

CORRECTNESS_BITS = 30


@dataclass(frozen=True)
class Neighbourhood:
    """The number of neighbours of each client, and the number of shares that recover a secret."""

    degree: int
    threshold: int


@dataclass(frozen=True)
class NeighbourGraph:
    """The graph of the clients that share pairwise masks in a round, and the sharing threshold.

    In the complete graph every client also holds a share of its own secrets (as in Bonawitz et al.
    2017), so that the threshold counts clients.

    Attributes:
        clients: all clients, in ascending order. A client's evaluation point in the secret sharing
            is its position in this list, counted from 1.
        neighbours: for each client, the clients with which it shares a mask.
        threshold: the number of shares that recover a secret.
        complete: whether every client is a neighbour of every other client.
    """

    clients: tuple[int, ...]
    neighbours: dict[int, tuple[int, ...]]
    threshold: int
    complete: bool

    @classmethod
    def for_round(cls, settings: SecureAggregationSettings, clients: Sequence[int]) -> Self:
        """Return the graph for the clients of a round.

        Positions in a sparse graph are drawn for each round with randomness of the operating
        system. So no party can choose its neighbours.

        Args:
            settings: the settings of secure aggregation.
            clients: the numbers of the clients that sent their keys.

        Raises:
            ThresholdError: a fixed threshold is above the number of clients, or at most half of it.
        """
        members = tuple(sorted(clients))
        protocol = settings.protocol
        if isinstance(protocol, SecAggPlusSettings):
            sparse = sparse_neighbourhood(
                len(members),
                corrupt_fraction=protocol.corrupt_fraction,
                dropout_fraction=protocol.dropout_fraction,
                security_bits=protocol.security_bits,
            )
            if sparse is not None and sparse.degree < len(members) - 1:
                return cls(members, _harary(members, sparse.degree), sparse.threshold, False)
            logger.info("%d clients are too few for a sparse graph: it is complete", len(members))
        others = {
            member: tuple(other for other in members if other != member) for member in members
        }
        return cls(members, others, complete_threshold(settings, len(members)), True)

    def point(self, client: int) -> int:
        """Return the given client's evaluation point in the secret sharing, a whole number ≥ 1."""
        return self.clients.index(client) + 1

    def holders(self, client: int) -> tuple[int, ...]:
        """Return the clients that hold shares of the given client's secrets."""
        others = self.neighbours[client]
        return tuple(sorted((*others, client))) if self.complete else others


@lru_cache(maxsize=256)
def sparse_neighbourhood(
    clients: int, *, corrupt_fraction: float, dropout_fraction: float, security_bits: int
) -> Neighbourhood | None:
    """Return the smallest safe number of neighbours and the threshold; None if none is safe.

    The result is valid for n clients, of which ⌊γn⌋ are corrupt and ⌊δn⌋ drop out, all at random
    positions in the graph. The number of neighbours is below n.

    Guarantee: with probability at least 1 - 2^-security_bits no client has `threshold` corrupt
    neighbours and the honest survivors stay connected. With probability at least 1 - 2^-30 every
    client keeps `threshold` neighbours. The threshold is above half the number of neighbours.

    Args:
        clients: the number n of clients.
        corrupt_fraction: the fraction γ of corrupt clients.
        dropout_fraction: the fraction δ of clients that drop out.
        security_bits: the exponent σ. Too many corrupt neighbours and a disconnected graph may each
            have a probability of half of 2^-σ.
    """
    for degree in range(2, clients):
        if degree % 2 and clients % 2:
            continue  # no graph has an odd number of odd degrees
        threshold = smallest_threshold(
            clients,
            degree,
            corrupt_fraction=corrupt_fraction,
            dropout_fraction=dropout_fraction,
            security_bits=security_bits,
            least=degree // 2 + 1,
        )
        if threshold is not None:
            return Neighbourhood(degree, threshold)
    return None


def smallest_threshold(
    clients: int,
    degree: int,
    *,
    corrupt_fraction: float,
    dropout_fraction: float,
    security_bits: int,
    least: int = 1,
) -> int | None:
    """Return the smallest safe threshold where each client has `degree` neighbours, or None.

    Args:
        clients: the number n of clients.
        degree: the number of neighbours of each client.
        corrupt_fraction: the fraction γ of corrupt clients.
        dropout_fraction: the fraction δ of clients that drop out.
        security_bits: the exponent σ, as in `sparse_neighbourhood`.
        least: the threshold is not below it.
    """
    from scipy.stats import hypergeom  # slow to import, and most runs have no sparse graph

    corrupt, dropped = _count(corrupt_fraction, clients), _count(dropout_fraction, clients)
    budget, others = 2.0 ** -(security_bits + 1), clients - 1
    # Isolated clients with independent neighbours. A Harary graph falls apart only if two runs of
    # ⌊degree/2⌋ consecutive places are lost, drawn without replacement.
    isolated = clients * (corrupt_fraction + dropout_fraction) ** degree
    run = 2 * (degree // 2)
    cut = math.comb(corrupt + dropped, run) / math.comb(clients, run)
    if max(isolated, math.comb(clients, 2) * cut) > budget:
        return None

    def is_private(threshold: int) -> bool:
        return bool(clients * hypergeom.sf(threshold - 1, others, corrupt, degree) <= budget)

    # Larger thresholds are safer; above `degree`, no threshold is kept.
    threshold = max(1 + bisect_left(range(1, degree + 1), True, key=is_private), least)
    lost = hypergeom.cdf(threshold - 1, others, others - dropped, degree)
    return threshold if clients * lost <= 2.0**-CORRECTNESS_BITS else None


def _count(fraction: float, clients: int) -> int:
    return math.floor(fraction * clients + 1e-9)  # 0.1 * 30 is below 3 in binary


def _harary(members: tuple[int, ...], degree: int) -> dict[int, tuple[int, ...]]:
    places = list(members)
    secrets.SystemRandom().shuffle(places)
    n, reach = len(places), degree // 2
    steps = {step for k in range(1, reach + 1) for step in (k, n - k)}
    if degree % 2:
        steps.add(n // 2)
    return {
        member: tuple(sorted(places[(place + step) % n] for step in steps))
        for place, member in enumerate(places)
    }


def complete_threshold(settings: SecureAggregationSettings, clients: int) -> int:
    """Return the number of shares that recover a secret in a complete graph of n clients.

    Args:
        settings: settings with a fixed threshold, or with `auto`, which means the least number
            above two thirds of n.
        clients: the number n of clients.

    Raises:
        ThresholdError: a fixed threshold is above the number of clients, or at most half of it.
    """
    protocol = settings.protocol
    threshold = protocol.threshold if isinstance(protocol, SecAggSettings) else "auto"
    if threshold == "auto":
        return 2 * clients // 3 + 1
    if not clients / 2 < threshold <= clients:
        raise ThresholdError(
            f"threshold {threshold} must be above half and at most all of the {clients} "
            "clients of the round; use threshold: auto",
            have=clients,
            need=threshold,
        )
    return threshold
