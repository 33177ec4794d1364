"""The rounds that one client may take part in, which the cost of correlated noise depends on."""

import math
from dataclasses import dataclass
from typing import Self

SCHEME = "min_separation"
"""Value of `federation.participation.scheme` that keeps the rounds of a client apart."""


@dataclass(frozen=True)
class MinSeparation:
    """Bound on the participation of a client: few rounds, far apart.

    Attributes:
        rounds: number of rounds n of the run.
        rounds_apart: smallest difference b between two rounds of one client.
        max_rounds: largest number k of rounds of one client.

    Raises:
        ValueError: a number is below 1, or k rounds that are b apart do not fit into n rounds.

    Example:
        >>> MinSeparation.of(rounds=2000, rounds_apart=100).max_rounds
        20
    """

    rounds: int
    rounds_apart: int
    max_rounds: int

    def __post_init__(self) -> None:
        if min(self.rounds, self.rounds_apart, self.max_rounds) < 1:
            raise ValueError(f"rounds, rounds_apart and max_rounds must be at least 1, got {self}")
        fit = -(-self.rounds // self.rounds_apart)
        if self.max_rounds > fit:
            raise ValueError(
                f"max_rounds must be at most {fit}, as many as fit into {self.rounds} rounds "
                f"{self.rounds_apart} apart, got {self.max_rounds}"
            )

    @classmethod
    def of(cls, rounds: int, rounds_apart: int, max_rounds: int | None = None) -> Self:
        """Return the bound in which a client has as many rounds as fit, at most `max_rounds`.

        Args:
            rounds: number of rounds n.
            rounds_apart: smallest difference b between two rounds of one client.
            max_rounds: upper limit of the number of rounds of one client; None for no other limit.
        """
        fit = -(-rounds // rounds_apart)
        return cls(rounds, rounds_apart, fit if max_rounds is None else min(fit, max_rounds))

    def scaled(self, share: float) -> Self:
        """Return the bound for a run with `share` times as many rounds, in total and of a client.

        Args:
            share: number of rounds of the other run, divided by that of this run, > 0.
        """
        rounds, most = (math.ceil(share * number) for number in (self.rounds, self.max_rounds))
        return type(self).of(rounds, self.rounds_apart, most)

    @property
    def pattern(self) -> range:
        """Rounds of one client, counted from 0, as early and as close together as allowed.

        They are 0, b, ..., (k − 1) b, with b = `rounds_apart` and k = `max_rounds`.
        """
        return range(0, self.max_rounds * self.rounds_apart, self.rounds_apart)
