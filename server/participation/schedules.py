"""Public schedules, which say which clients are in each round: uniform, Poisson, turns, by trace.

Each schedule depends only on the seed and public settings. Later rounds do not change earlier ones.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from fedsim.core.streams import Purpose, stream
from fedsim.noise.correlated.settings import MinSeparation
from fedsim.server.participation.settings import join_ranges, parse_ranges


class Schedule(Protocol):
    """Interface of a schedule, which says which clients are in each round."""

    @property
    def has_all(self) -> bool:
        """Whether all clients are in every round."""
        ...

    def in_round(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round, in ascending order."""
        ...

    def sizes(self, rounds: int) -> tuple[int, int]:
        """Return the smallest and the largest number of clients of a round, in `rounds` rounds.

        Empty rounds do not count for the smallest number.
        """
        ...


@dataclass(frozen=True)
class _SizedSchedule:
    """Base class of schedules whose rounds have `clients_per_round` clients, or have it on average.

    Attributes:
        seed: the experiment's seed.
        num_clients: the number of clients of the federation, N.
        clients_per_round: the number of clients in a round, k, exact or expected.
    """

    seed: int
    num_clients: int
    clients_per_round: int

    @property
    def has_all(self) -> bool:
        """Whether all clients are in every round."""
        return self.clients_per_round >= self.num_clients

    def sizes(self, rounds: int) -> tuple[int, int]:
        """Return the smallest and the largest size of a round; both are `clients_per_round`.

        Where clients are drawn independently, it is the expected size.
        """
        size = min(self.clients_per_round, self.num_clients)
        return size, size


@dataclass(frozen=True)
class UniformSchedule(_SizedSchedule):
    """Schedule that draws a fixed number of clients in each round, without replacement."""

    def in_round(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round, in ascending order."""
        everybody = np.arange(self.num_clients)
        return draw_of(everybody, self.clients_per_round, self.seed, round_number)


@dataclass(frozen=True)
class PoissonSchedule(_SizedSchedule):
    """Schedule by Poisson sampling of the clients of each round.

    Each client is in a round independently, with probability exactly k / N. N is the number of
    clients of the federation, and k the expected number of clients in a round.
    """

    def in_round(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round, in ascending order."""
        if self.has_all:
            return tuple(range(self.num_clients))
        generator = stream(self.seed, Purpose.PARTICIPATION, round_number=round_number)
        # Integers, as a uniform float is below k / N with a slightly different probability.
        drawn = generator.integers(self.num_clients, size=self.num_clients)
        return tuple(int(client) for client in (drawn < self.clients_per_round).nonzero()[0])


@dataclass(frozen=True)
class SeparatedSchedule(_SizedSchedule):
    """Schedule of N clients that take turns, k in each round, in a random order drawn once.

    Guarantee: two rounds of a client are at least ⌊N / k⌋ apart, and a client is in at most
    ⌈n k / N⌉ of n rounds. A client that misses its turn waits for the next one.

    Proof. Round t takes the places (t − 1) k ... t k − 1 of the order, which repeats after N
    places. A client's places are N apart, and so are ⌊N / k⌋ rounds or more. Of n k successive
    places, at most ⌈n k / N⌉ are those of one client. ∎
    """

    def separation(self, rounds: int, rounds_apart: int | None = None) -> MinSeparation:
        """Return how far apart the rounds of a client are, and the largest number of them.

        Args:
            rounds: the number of rounds of the run.
            rounds_apart: smallest difference to claim between two rounds of a client; None for
                ⌊N / k⌋ with N clients, of which k are in each round.
        """
        size = self.sizes(rounds)[0]
        most = -(-rounds * size // self.num_clients)
        return MinSeparation.of(rounds, rounds_apart or self.num_clients // size, most)

    def in_round(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round, in ascending order."""
        size = self.sizes(round_number)[0]
        places = np.arange((round_number - 1) * size, round_number * size) % self.num_clients
        return tuple(sorted(self._order[places].tolist()))

    @cached_property
    def _order(self) -> np.ndarray:
        """Numbers of all clients in the order of their turns (N,)."""
        return stream(self.seed, Purpose.PARTICIPATION).permutation(self.num_clients)


@dataclass(frozen=True)
class CyclicSchedule:
    """Schedule in which groups of clients take turns (Eichner et al. 2019; Cho et al. 2023).

    Attributes:
        seed: the experiment's seed.
        groups: the clients of each group, ascending, in the order of the turns.
        rounds_per_group: the number of consecutive rounds of a group's turn.
        clients_per_round: the number of clients drawn from the group; a smaller group is taken
            whole.
    """

    seed: int
    groups: tuple[tuple[int, ...], ...]
    rounds_per_group: int
    clients_per_round: int

    has_all = False

    def in_round(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round, in ascending order."""
        turn = (round_number - 1) // self.rounds_per_group
        group = np.array(self.groups[turn % len(self.groups)], dtype=np.int64)
        return draw_of(group, self.clients_per_round, self.seed, round_number)

    def sizes(self, rounds: int) -> tuple[int, int]:
        """Return the smallest and the largest number of clients of a round."""
        turns = -(-rounds // self.rounds_per_group)
        sizes = [min(len(group), self.clients_per_round) for group in self.groups[:turns]]
        return min(sizes), max(sizes)


@dataclass(frozen=True)
class TraceSchedule:
    """Schedule that draws uniformly among the clients that a public trace lists as available.

    Attributes:
        seed: the experiment's seed.
        num_clients: the number of clients, N; the trace names clients 0 to N - 1 only.
        clients_per_round: the number of clients drawn in a round; all if fewer are available.
        availability: the trace, with lines `clients: rounds` and ranges such as `1-20`.
        period: the number of rounds after which the trace repeats; None for no repetition.
        min_available: the fewest available clients of a round; a round with fewer has no clients.
    """

    seed: int
    num_clients: int
    clients_per_round: int
    availability: str
    period: int | None = None
    min_available: int = 1

    has_all = False

    def in_round(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round, in ascending order; empty if too few are available."""
        place = round_number if self.period is None else (round_number - 1) % self.period + 1
        clients, first, end = self._windows
        available = np.unique(clients[(first <= place) & (place < end)])
        if len(available) < self.min_available:
            return ()
        return draw_of(available, self.clients_per_round, self.seed, round_number)

    def sizes(self, rounds: int) -> tuple[int, int]:
        """Return the smallest and the largest number of clients of a round.

        Empty rounds do not count for the smallest number; if all rounds are empty, both are 0.
        """
        last = rounds if self.period is None else min(rounds, self.period)
        _, first, end = self._windows
        change = np.zeros(last + 2, dtype=np.int64)
        np.add.at(change, np.minimum(first, last + 1), 1)
        np.add.at(change, np.minimum(end, last + 1), -1)
        available = np.cumsum(change)[1 : last + 1]
        enough = available[available >= self.min_available]
        if not len(enough):
            return 0, 0
        drawn = np.minimum(enough, self.clients_per_round)
        return int(drawn.min()), int(drawn.max())

    @cached_property
    def clients(self) -> frozenset[int]:
        """Numbers of all clients that the trace names."""
        return frozenset(self._windows[0].tolist())

    @cached_property
    def _windows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The availability windows as arrays (m,): client, first round, and round after the last.

        The windows of one client are disjoint.
        """
        rounds_of: dict[int, list[range]] = {}
        for line in self.availability.splitlines():
            if line.strip():
                clients, _, rounds = line.partition(":")
                windows = parse_ranges(rounds)
                for numbers in parse_ranges(clients):
                    for client in numbers:
                        rounds_of.setdefault(client, []).extend(windows)
        rows = [
            (client, window.start, window.stop)
            for client, windows in sorted(rounds_of.items())
            for window in join_ranges(windows)
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]


def even_ranges(count: int, parts: int) -> tuple[range, ...]:
    """Divide `range(count)` into consecutive parts whose lengths differ by at most 1."""
    ends = [count * part // parts for part in range(parts + 1)]
    return tuple(range(start, end) for start, end in pairwise(ends))


def draw_of(clients: np.ndarray, number: int, seed: int, round_number: int) -> tuple[int, ...]:
    """Return `number` clients, drawn uniformly without replacement, or all if there are fewer.

    The result is in ascending order.

    Args:
        clients: the client numbers to draw from (n,), ascending.
        number: the number of clients to draw.
        seed: the experiment's seed.
        round_number: the round >= 1.
    """
    if number >= len(clients):
        return tuple(clients.tolist())
    generator = stream(seed, Purpose.PARTICIPATION, round_number=round_number)
    places = generator.choice(len(clients), number, replace=False)
    return tuple(sorted(clients[places].tolist()))
