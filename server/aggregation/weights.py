"""Weights of the clients' updates: whole numbers, fixed before round 1 from public plan values.

A client's weight is n^a / z^b with its number of examples n and its noise z (`WeightingSettings`).
Weights depend on nothing that a client reports and on nothing private, so they are post-processing
of the uploads. They are whole numbers, so that plain sums, secure sums and nodes on other machines
use the same ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from fedsim.core.errors import InputError
from fedsim.server.settings import WeightingSettings

WEIGHT_UNITS = 1 << 16  # weight of the heaviest client, where weights are no numbers of examples
_FINE_UNITS = 1 << 40  # the same, before shares are capped


class WeightingError(InputError, ValueError):
    """Plan values that give no weights; the message names the setting and the fix."""


@dataclass(frozen=True)
class PlanValues:
    """The public values of one client's plan that its weight depends on.

    Attributes:
        examples: number of examples.
        noise: noise multiplier over the sampling rate, z / q; 1 without privacy. The noise in an
            average of n examples is in proportion to noise / n.
    """

    examples: int
    noise: float = 1.0


@dataclass(frozen=True)
class ClientWeights:
    """The weights of all clients, the same in every round.

    In a round the mean is over the clients that took part: their weights over the sum of them.

    Attributes:
        name: the weighting, for messages.
        values: weight of each client, whole numbers >= 0; 0 only for a client without examples.
        examples: number of examples of each client, where weights depend on it; empty elsewhere.
    """

    name: str
    values: tuple[int, ...]
    examples: tuple[int, ...] = ()

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every weight is 1."""
        return all(value == 1 for value in self.values)

    def announced(self, client: int) -> int | None:
        """Return the weight that requests carry, so that a client can compare it; None for 1."""
        return None if self.is_uniform else self.values[client]

    def check_examples(self, client: int, examples: int) -> None:
        """Check the number of examples that a client reports against its plan.

        Args:
            client: number of the client.
            examples: the reported number.

        Raises:
            WeightingError: the plan has another number.
        """
        if self.examples and examples != self.examples[client]:
            raise WeightingError(
                f"reports {examples:,} examples, but its weight was planned for "
                f"{self.examples[client]:,}; run the same experiment on the same data on both sides"
            )


def uniform_weights(num_clients: int) -> ClientWeights:
    """Return a weight of 1 for each client."""
    return ClientWeights("uniform", (1,) * num_clients)


def plan_weights(
    weighting: WeightingSettings,
    clients: Sequence[PlanValues],
    *,
    clients_per_round: int,
    units: int = WEIGHT_UNITS,
) -> ClientWeights:
    """Return the weights of all clients.

    Powers other than those of `examples` and `uniform` are rounded to `units` steps of the heaviest
    weight, at least 1, a public rounding.

    Args:
        weighting: the powers of size and noise, and the largest share.
        clients: the plan of each client.
        clients_per_round: number of clients that a round asks.
        units: weight of the heaviest client, >= 1.

    Raises:
        WeightingError: some clients add noise and others none, or no weights keep `max_share`.
    """
    if weighting.is_uniform:
        return uniform_weights(len(clients))
    share = None if weighting.max_share is None else Fraction(weighting.max_share)
    if weighting.name == "examples":
        values = _cap([one.examples for one in clients], clients_per_round, share)
    else:
        fine = _rounded(_powers(weighting, clients), _FINE_UNITS)
        rounded = _rounded(_cap(fine, clients_per_round, share), units)
        values = _cap(rounded, clients_per_round, share)  # rounding may have raised a share
    sizes = tuple(one.examples for one in clients) if weighting.uses_sizes else ()
    return ClientWeights(weighting.name, tuple(values), sizes)


def _powers(weighting: WeightingSettings, clients: Sequence[PlanValues]) -> list[float]:
    """Return n^a / z^b of each client; where no client adds noise, z counts as 1."""
    by_size, by_noise = weighting.powers
    silent = [number for number, one in enumerate(clients) if one.noise == 0.0]
    if by_noise and silent and len(silent) < len(clients):
        raise WeightingError(
            f"federation.weighting: noise has no weight for client {silent[0]}, which adds no "
            "noise while others do; set noise_power: 0, or give every client a noise_multiplier"
        )
    powers = [0.0 if one.examples == 0 else float(one.examples) ** by_size for one in clients]
    if not by_noise or silent:
        return powers
    return [power / one.noise**by_noise for power, one in zip(powers, clients, strict=True)]


def _rounded(values: Sequence[float], units: int) -> list[int]:
    """Return values as whole numbers; the largest is `units`, and a positive one is at least 1."""
    largest = max(values, default=0.0)
    return [max(1, round(value / largest * units)) if value > 0 else 0 for value in values]


def _cap(values: Sequence[int], participants: int, share: Fraction | None) -> list[int]:
    """Return whole weights cut at the largest bound that keeps every share.

    Guarantee: in every round of `participants` clients with examples, whichever they are, no weight
    is more than `share` of the sum. The worst round of a client is that with the lightest others.

    Args:
        values: weights, whole numbers >= 0.
        participants: number of clients in a round.
        share: the largest share; None: no bound.

    Raises:
        WeightingError: not even equal weights keep the share.
    """
    positive = sorted(value for value in values if value > 0)
    if share is None or not positive:
        return list(values)
    count = min(participants, len(positive))
    if share * count < 1:
        raise WeightingError(
            f"federation.weighting.max_share is {float(share):g}, but a round has {count} clients "
            f"with examples, and equal weights are a share of 1/{count} each; raise max_share"
        )
    bound = _largest_bound(positive[: count - 1], share)
    return list(values) if bound is None else [min(value, bound) for value in values]


def _largest_bound(lightest: Sequence[int], share: Fraction) -> int | None:
    """Return the largest whole b with b <= share · (b + Σ min(u, b)) over `lightest`; None for any.

    The right side is concave in b. Between two neighbours of `lightest` it is linear, which gives
    the b of equality.

    Args:
        lightest: the lightest weights of a round beside the heaviest client's, ascending.
        share: the largest share, at least 1 / (number of lightest weights + 1).
    """
    if share >= 1:
        return None
    below, count = sum(lightest), len(lightest)
    for number in range(count, 0, -1):  # of the lightest weights that are at most b
        slope = 1 - share * (1 + count - number)
        if slope > 0 and share * below >= slope * lightest[number - 1]:
            return math.floor(share * below / slope)
        below -= lightest[number - 1]
    return lightest[0]
