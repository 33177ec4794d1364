"""Who takes part in which round: fixed by the seed before the run.

The choice depends on nothing private and is known in advance, so every client's number of rounds,
and with it its noise, can be planned. It is also known to the server: sampling clients gives no
privacy amplification, and none is claimed.
"""

from dataclasses import dataclass
from functools import cached_property

from fedsim.core.streams import Purpose, stream
from fedsim.server.settings import FederationSettings


@dataclass(frozen=True)
class Participation:
    """The participation schedule of a federation."""

    seed: int
    num_clients: int
    clients_per_round: int
    rounds: int

    @classmethod
    def of(cls, settings: FederationSettings, *, num_clients: int, seed: int) -> "Participation":
        """Return the schedule that the settings describe."""
        per_round = settings.clients_per_round or num_clients
        return cls(seed, num_clients, per_round, settings.rounds)

    def in_round(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round in ascending order: a uniform choice without repetition."""
        if self.clients_per_round >= self.num_clients:
            return tuple(range(self.num_clients))
        generator = stream(self.seed, Purpose.PARTICIPATION, round_number=round_number)
        chosen = generator.choice(self.num_clients, self.clients_per_round, replace=False)
        return tuple(sorted(int(client) for client in chosen))

    def rounds_of(self, client: int) -> tuple[int, ...]:
        """Return the rounds that a client is scheduled for, ascending."""
        return self._schedule[client]

    def planned_rounds(self) -> tuple[int, ...]:
        """Return, for each client, the number of rounds it is scheduled for."""
        return tuple(len(rounds) for rounds in self._schedule)

    @cached_property
    def _schedule(self) -> tuple[tuple[int, ...], ...]:
        """Every client's rounds, from one pass over the rounds: a draw costs all clients' time."""
        everybody = range(1, self.rounds + 1)
        if self.clients_per_round >= self.num_clients:
            return (tuple(everybody),) * self.num_clients
        rounds: list[list[int]] = [[] for _ in range(self.num_clients)]
        for round_number in everybody:
            for client in self.in_round(round_number):
                rounds[client].append(round_number)
        return tuple(tuple(numbers) for numbers in rounds)
