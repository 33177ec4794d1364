"""The participants of each round: a public schedule, or a secret draw.

A uniform schedule is fixed by the seed before the run. It depends on nothing private and is known
in advance, so each client's number of rounds, and with it its noise, can be planned. The server
knows it too: it gives no privacy amplification, and none is claimed.

A Poisson draw takes each client on its own. With privacy it is secret: nobody but the server learns
who takes part, so every client is charged for every round, whether it was drawn or not, with
amplification by the draw. With noise from the operating system the draw is from there too, and no
schedule exists.
"""

import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fedsim.core.streams import Purpose, stream
from fedsim.server.settings import FederationSettings


@dataclass(frozen=True)
class Participation:
    """The participation of clients in the rounds of a federation.

    Attributes:
        seed: the experiment's seed.
        num_clients: N, the clients of the federation.
        clients_per_round: k, the clients of a round; with Poisson draws their expected number.
        rounds: number of rounds.
        scheme: how the clients of a round are drawn.
        is_secret: whether nobody but the server may learn who takes part in a round.
        is_keyed: whether draws follow from the seed; else they are from the operating system.
    """

    seed: int
    num_clients: int
    clients_per_round: int
    rounds: int
    scheme: Literal["uniform", "poisson"] = "uniform"
    is_secret: bool = False
    is_keyed: bool = True

    @classmethod
    def of(
        cls,
        settings: FederationSettings,
        *,
        num_clients: int,
        seed: int,
        private: bool = False,
        secure_noise: bool = False,
    ) -> "Participation":
        """Return the participation of an experiment.

        Args:
            settings: `federation:` of the experiment.
            num_clients: clients of the federation.
            seed: the experiment's seed.
            private: whether the experiment has differential privacy.
            secure_noise: whether its noise is from the operating system.
        """
        per_round = settings.clients_per_round or num_clients
        scheme = settings.participation.scheme
        secret = private and scheme == "poisson"
        return cls(
            seed,
            num_clients,
            per_round,
            settings.rounds,
            scheme,
            is_secret=secret,
            is_keyed=not (secret and secure_noise),
        )

    @property
    def rate(self) -> float:
        """The probability k / N with which a client takes part in a round."""
        return min(1.0, self.clients_per_round / self.num_clients)

    @property
    def secret_rate(self) -> float | None:
        """The rate of a secret draw; None where participation is public."""
        return self.rate if self.is_secret else None

    def draw(self, round_number: int) -> tuple[int, ...]:
        """Return the clients that take part in a round, in ascending order.

        Guarantee: a Poisson draw takes each client independently with probability exactly k / N.
        Without a key each call is another draw.
        """
        if self.is_keyed:
            return self.in_round(round_number)
        return tuple(
            client
            for client in range(self.num_clients)
            if secrets.randbelow(self.num_clients) < self.clients_per_round
        )

    def in_round(self, round_number: int) -> tuple[int, ...]:
        """Return the clients that may take part in a round, in ascending order.

        They are those that do, or all of them where the draw has no key.
        """
        if self.clients_per_round >= self.num_clients or not self.is_keyed:
            return tuple(range(self.num_clients))
        generator = stream(self.seed, Purpose.PARTICIPATION, round_number=round_number)
        if self.scheme == "poisson":  # integers: a float below k / N has another probability
            drawn = generator.integers(self.num_clients, size=self.num_clients)
            return tuple(int(one) for one in (drawn < self.clients_per_round).nonzero()[0])
        chosen = generator.choice(self.num_clients, self.clients_per_round, replace=False)
        return tuple(sorted(int(client) for client in chosen))

    def on_record(self, round_number: int) -> tuple[int, ...]:
        """Return the clients that the records of a round account for: those that took part.

        Where participation is secret, the records name no client.
        """
        return () if self.is_secret else self.in_round(round_number)

    def charged_in(self, round_number: int) -> tuple[int, ...]:
        """Return the clients that may be charged for a round, in ascending order."""
        return tuple(range(self.num_clients)) if self.is_secret else self.in_round(round_number)

    def rounds_of(self, client: int) -> tuple[int, ...]:
        """Return the rounds that a client is charged for, ascending: those it takes part in.

        Where participation is secret these are all rounds.
        """
        return self._schedule[client]

    def planned_rounds(self) -> tuple[int, ...]:
        """Return the number of rounds that each client is charged for."""
        return tuple(len(rounds) for rounds in self._schedule)

    @cached_property
    def _schedule(self) -> tuple[tuple[int, ...], ...]:
        """Every client's rounds, from one pass: each draw takes time for all clients."""
        all_rounds = range(1, self.rounds + 1)
        if self.clients_per_round >= self.num_clients or self.is_secret:
            return (tuple(all_rounds),) * self.num_clients
        rounds: list[list[int]] = [[] for _ in range(self.num_clients)]
        for round_number in all_rounds:
            for client in self.in_round(round_number):
                rounds[client].append(round_number)
        return tuple(tuple(numbers) for numbers in rounds)
