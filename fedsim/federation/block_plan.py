"""Blocks: the clients of each round that train together, fixed by the experiment alone.

Client numbers are cut into ranges. A range stays on one worker, with its data. In each round the
scheduled participants of a range are cut into blocks. A client that withdrew or failed keeps its
place in its block, so membership is the same on one worker, on many, and after a resume.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from fedsim.server.participation.participation import Participation

MAX_RANGES = 64
MAX_LOT_RATIO = 2.0  # of a block: every member is padded to the longest lot


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of an experiment.

    Guarantee: a function of the three fields, which the experiment fixes before round 1; workers,
    machines, withdrawals and failures do not enter. Every scheduled participant of a round is in
    exactly one block, and a block lies in one range.

    Attributes:
        participation: the schedule of the clients.
        max_clients: most clients of a block ≥ 1.
        expected_lots: public expected examples of each client's lot, by client.
    """

    participation: Participation
    max_clients: int
    expected_lots: tuple[float, ...]
    _last_round: dict[int, Mapping[int, tuple[int, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Ranges of client numbers, about a block's participants each.

        More than one range are an even number, for the balance of two workers.
        """
        clients = self.participation.num_clients
        _, participants = self.participation.round_sizes
        blocks = -(-participants // self.max_clients)
        even = blocks + blocks % 2 if blocks > 1 else 1
        parts = _even_parts(clients, min(even, MAX_RANGES, clients))
        return tuple(range(clients)[part] for part in parts)

    def blocks(self, round_number: int) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of a round, in ascending order of their clients."""
        scheduled = self.participation.in_round(round_number)
        ends = [bisect_left(scheduled, clients.stop) for clients in self.ranges]
        return tuple(
            similar[part]
            for start, end in pairwise([0, *ends])
            for similar in self._split_by_lot(scheduled[start:end])
            for part in _even_parts(len(similar), -(-len(similar) // self.max_clients))
        )

    def block_of(self, round_number: int, client: int) -> tuple[int, ...]:
        """Return the block of a client in a round, ascending; a client off schedule is alone.

        Args:
            round_number: the round ≥ 1.
            client: the client's number.
        """
        if round_number not in self._last_round:
            found = {member: block for block in self.blocks(round_number) for member in block}
            self._last_round.clear()
            self._last_round[round_number] = found
        return self._last_round[round_number].get(client, (client,))

    def _split_by_lot(self, clients: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield runs of clients whose expected lots differ by at most `MAX_LOT_RATIO`."""
        start, least, most = 0, float("inf"), 0.0
        for place, client in enumerate(clients):
            lot = self.expected_lots[client]
            least, most = min(least, lot), max(most, lot)
            if most > MAX_LOT_RATIO * least:
                yield clients[start:place]
                start, least, most = place, lot, lot
        if start < len(clients):
            yield clients[start:]


def _even_parts(count: int, parts: int) -> Iterator[slice]:
    """Yield consecutive parts of `range(count)` whose lengths differ by at most 1."""
    ends = (count * part // parts for part in range(parts + 1))
    return (slice(start, end) for start, end in pairwise(ends))
