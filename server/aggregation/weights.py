"""Clients' weights in the mean of a round: whole numbers, fixed by the public plan before round 1.

With n examples and noise z (noise multiplier over sampling rate), a client's weight is n^a / z^b.
`WeightingSettings` has a and b. Weights depend on no report of a client and on nothing private, so
weighting is post-processing of the uploads. They are whole numbers, so plain sums, secure sums and
all machines use the same weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from fedsim.core.errors import InputError
from fedsim.server.settings import WeightingSettings

WEIGHT_UNITS = 1 << 16  # weight of the heaviest client, unless weights are numbers of examples
_FINE_UNITS = 1 << 40  # the heaviest client's weight before shares are capped


class WeightingError(InputError, ValueError):
    """Error if no valid weights exist; the message names the setting and the fix."""


@dataclass(frozen=True)
class PlanValues:
    """Public values that determine one client's weight.

    Attributes:
        examples: the client's number of examples.
        noise: the client's noise multiplier divided by its sampling rate. The value is 1 without
            privacy. The noise in an average of n examples is proportional to `noise` / n.
    """

    examples: int
    noise: float = 1.0


@dataclass(frozen=True)
class ClientWeights:
    """Weights of all clients, the same in every round.

    A participant's share in the mean of a round is its weight / the total weight of participants.

    Attributes:
        name: the name of the weighting, for messages.
        values: the weight of each client, a whole number; 0 only for a client without examples.
        examples: the number of examples of each client if weights depend on it, else empty.
    """

    name: str
    values: tuple[int, ...]
    examples: tuple[int, ...] = ()

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every client's weight is 1."""
        return all(value == 1 for value in self.values)

    def announced(self, client: int) -> int | None:
        """Return a client's weight for its train requests, or None if all clients have weight 1."""
        return None if self.is_uniform else self.values[client]

    def check_examples(self, client: int, examples: int) -> None:
        """Check that a client reports the number of examples for which its weight was planned.

        Args:
            client: the client's number.
            examples: the number of examples that it reports.

        Raises:
            WeightingError: the number differs from the planned one.
        """
        if self.examples and examples != self.examples[client]:
            raise WeightingError(
                f"reports {examples:,} examples, but its weight was planned for "
                f"{self.examples[client]:,}; run the same experiment on the same data on both sides"
            )


def uniform_weights(num_clients: int) -> ClientWeights:
    """Return weights of 1 for all clients."""
    return ClientWeights("uniform", (1,) * num_clients)


def plan_weights(
    weighting: WeightingSettings,
    clients: Sequence[PlanValues],
    *,
    clients_per_round: int,
    units: int = WEIGHT_UNITS,
) -> ClientWeights:
    """Return the weights of all clients under a weighting rule.

    Under the rule `examples_over_noise`, weights are scaled so that the largest is `units`, and
    rounded to whole numbers >= 1 (0 for a client without examples). The rounding is public.

    Args:
        weighting: the rule: exponents of size and noise, and a client's largest share of a mean.
        clients: the public plan values of each client.
        clients_per_round: the number of clients that are asked in a round.
        units: the largest weight, >= 1.

    Raises:
        WeightingError: only some of the clients add noise, or no weights keep every client's share
            of a mean within `max_share`.
    """
    if weighting.is_uniform:
        return uniform_weights(len(clients))
    share = None if weighting.max_share is None else Fraction(weighting.max_share)
    if weighting.name == "examples":
        values = _cap([client.examples for client in clients], clients_per_round, share)
    else:
        fine = _rounded(_powers(weighting, clients), _FINE_UNITS)
        rounded = _rounded(_cap(fine, clients_per_round, share), units)
        values = _cap(rounded, clients_per_round, share)  # rounding may have raised a share
    sizes = tuple(client.examples for client in clients) if weighting.uses_sizes else ()
    return ClientWeights(weighting.name, tuple(values), sizes)


def _powers(weighting: WeightingSettings, clients: Sequence[PlanValues]) -> list[float]:
    """Return n^a / z^b of each client, with z = 1 where no client adds noise."""
    by_size, by_noise = weighting.powers
    silent = [number for number, client in enumerate(clients) if client.noise == 0.0]
    if by_noise and silent and len(silent) < len(clients):
        raise WeightingError(
            f"federation.weighting: examples_over_noise has no weight for client {silent[0]}, "
            f"which adds no "
            "noise while others do; set noise_power: 0, or give every client a noise_multiplier"
        )
    powers = [
        0.0 if client.examples == 0 else float(client.examples) ** by_size for client in clients
    ]
    if not by_noise or silent:
        return powers
    return [power / client.noise**by_noise for power, client in zip(powers, clients, strict=True)]


def _rounded(values: Sequence[float], units: int) -> list[int]:
    """Scale values to whole numbers: the largest becomes `units`, a positive one at least 1."""
    largest = max(values, default=0.0)
    return [max(1, round(value / largest * units)) if value > 0 else 0 for value in values]


def _cap(values: Sequence[int], participants: int, share: Fraction | None) -> list[int]:
    """Return weights capped so that no client has more than its largest share of a round.

    Guarantee: in every round of `participants` clients with examples, whichever they are, no weight
    is more than `share` of the sum. A client's worst round is the one with the lightest others.

    Args:
        values: the weights, whole numbers >= 0.
        participants: the number of clients in a round.
        share: the largest share; None for no cap.

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
    """Return the largest whole b with b <= share · (b + Σ min(u, b)) over u in `lightest`.

    None where every b satisfies it. The right side is concave in b. Between two neighbours of
    `lightest` it is linear, so equality can be solved for b there.

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
