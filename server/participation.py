"""The schedule of participants, fixed by the seed before the run.

The schedule depends on nothing private and is known in advance, so each client's number of rounds,
and with it its noise, can be planned. The server knows it too: client sampling gives no privacy
amplification, and none is claimed.
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
        """Return the schedule of an experiment.

        Args:
            settings: `federation:` of the experiment.
            num_clients: clients of the federation.
            seed: the experiment's seed.
        """
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
        """Return the scheduled rounds of a client, ascending."""
        return self._schedule[client]

    def planned_rounds(self) -> tuple[int, ...]:
        """Return the number of scheduled rounds of each client."""
        return tuple(len(rounds) for rounds in self._schedule)

    @cached_property
    def _schedule(self) -> tuple[tuple[int, ...], ...]:
        """Every client's rounds, from one pass: each draw takes time for all clients."""
        all_rounds = range(1, self.rounds + 1)
        if self.clients_per_round >= self.num_clients:
            return (tuple(all_rounds),) * self.num_clients
        rounds: list[list[int]] = [[] for _ in range(self.num_clients)]
        for round_number in all_rounds:
            for client in self.in_round(round_number):
                rounds[client].append(round_number)
        return tuple(tuple(numbers) for numbers in rounds)
