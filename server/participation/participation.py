"""The participants of each round, by a public schedule or a secret draw, and its stragglers.

A public schedule is fixed by the seed and by public settings before the run. It depends on nothing
private and is known in advance, so each client's number of rounds, and with it its noise, can be
planned. The server knows it too: it gives no privacy amplification, and none is claimed.

A Poisson draw takes each client on its own. With privacy it is secret: nobody but the server learns
who takes part, so every client is charged for every round, whether it was drawn or not, with
amplification by the draw. With noise from the operating system the draw is from there too, and no
schedule exists.

Stragglers do a part of their local work (Li et al. 2020, FedProx). Who straggles, and how many
steps it takes, follows from the seed: public facts, like the schedule.
"""

import secrets
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedsim.core.streams import Purpose, stream
from fedsim.server.participation.buffered import BufferedSchedule
from fedsim.server.participation.schedules import (
    CyclicSchedule,
    PoissonSchedule,
    Schedule,
    TraceSchedule,
    UniformSchedule,
    equal_groups,
)
from fedsim.server.participation.settings import (
    BufferedParticipation,
    CyclicParticipation,
    DurationTable,
    PartialWorkSettings,
    ParticipationSettings,
    PoissonParticipation,
    TraceParticipation,
    UniformParticipation,
    parse_ranges,
)
from fedsim.server.settings import FederationSettings


@dataclass(frozen=True)
class Stragglers:
    """The stragglers of each round and their numbers of steps.

    Attributes:
        seed: the experiment's seed.
        share: share of the clients of a round that straggle, to the nearest whole number.
    """

    seed: int
    share: float

    def count(self, clients: int) -> int:
        """Return the number of stragglers among the clients of a round."""
        return min(clients, int(self.share * clients + 0.5))

    def among(self, clients: tuple[int, ...], round_number: int) -> frozenset[int]:
        """Return the stragglers of a round, each set as likely as another.

        Args:
            clients: the clients of the round, ascending.
            round_number: the round >= 1.
        """
        number = self.count(len(clients))
        if number == len(clients):
            return frozenset(clients)
        generator = stream(self.seed, Purpose.PARTIAL_WORK, round_number=round_number)
        places = generator.choice(len(clients), number, replace=False)
        return frozenset(np.array(clients)[places].tolist())

    def steps(self, client: int, round_number: int, whole: int) -> int:
        """Return the steps of a straggler: uniform from 1 to one less than a whole round's.

        A round of one step cannot be divided: it is whole.

        Args:
            client: its number.
            round_number: the round >= 1.
            whole: steps of its whole round.
        """
        if whole < 2:
            return whole
        # Client 0 has the stream of the stragglers' draw: clients begin at 1.
        key = {"client": client + 1, "round_number": round_number}
        return int(stream(self.seed, Purpose.PARTIAL_WORK, **key).integers(1, whole))


@dataclass(frozen=True)
class Participation:
    """The participation of clients in the rounds of a federation.

    Attributes:
        seed: the experiment's seed.
        num_clients: N, the clients of the federation.
        clients_per_round: k, the most clients of a round; with Poisson draws their expected number.
        rounds: number of rounds.
        settings: how the clients of a round are drawn.
        is_secret: whether nobody but the server may learn who takes part in a round.
        is_keyed: whether draws follow from the seed; else they are from the operating system.
        partial_work: stragglers; None: there are none.
    """

    seed: int
    num_clients: int
    clients_per_round: int
    rounds: int
    settings: ParticipationSettings = field(default_factory=UniformParticipation)
    is_secret: bool = False
    is_keyed: bool = True
    partial_work: PartialWorkSettings | None = None
    _stragglers: dict[int, frozenset[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        scheme = settings.participation
        per_round = settings.clients_per_round or num_clients
        if isinstance(scheme, BufferedParticipation):
            per_round = scheme.buffer_size
        secret = private and isinstance(scheme, PoissonParticipation)
        return cls(
            seed,
            num_clients,
            per_round,
            settings.rounds,
            scheme,
            is_secret=secret,
            is_keyed=not (secret and secure_noise),
            partial_work=settings.partial_work,
        )

    @property
    def scheme(self) -> str:
        """The name of the scheme."""
        return self.settings.scheme

    @cached_property
    def schedule(self) -> Schedule:
        """The clients of every round, where draws follow from the seed."""
        settings, basis = self.settings, (self.seed, self.num_clients, self.clients_per_round)
        match settings:
            case UniformParticipation():
                return UniformSchedule(*basis)
            case PoissonParticipation():
                return PoissonSchedule(*basis)
            case CyclicParticipation():
                groups = groups_of(settings, self.num_clients)
                turns = settings.rounds_per_group
                return CyclicSchedule(self.seed, groups, turns, self.clients_per_round)
            case TraceParticipation():
                text = settings.availability or ""
                return TraceSchedule(*basis, text, settings.period, settings.min_available)
            case BufferedParticipation():
                durations = settings.durations
                return BufferedSchedule(
                    self.seed,
                    self.num_clients,
                    settings.concurrency,
                    settings.buffer_size,
                    tuple(durations.values or ())
                    if isinstance(durations, DurationTable)
                    else durations,
                )

    @property
    def buffered(self) -> BufferedSchedule | None:
        """The schedule of asynchronous rounds; None where all clients of a round start with it."""
        return self.schedule if isinstance(self.schedule, BufferedSchedule) else None

    @cached_property
    def round_sizes(self) -> tuple[int, int]:
        """The fewest clients of a round that has any, and the most, without failures."""
        fewest, most = self.schedule.sizes(self.rounds)
        if not self._drops:
            return fewest, most
        count = self.stragglers.count
        return fewest - count(fewest), most - count(most)

    @cached_property
    def stragglers(self) -> Stragglers:
        """Who straggles, and how many steps stragglers take."""
        return Stragglers(self.seed, 0.0 if self.partial_work is None else self.partial_work.share)

    def stragglers_in(self, round_number: int) -> frozenset[int]:
        """Return the stragglers of a round, also where they are left out of it."""
        if self.partial_work is None:
            return frozenset()
        if round_number not in self._stragglers:
            clients = self.schedule.in_round(round_number)
            self._stragglers[round_number] = self.stragglers.among(clients, round_number)
        return self._stragglers[round_number]

    @property
    def _drops(self) -> bool:
        return self.partial_work is not None and self.partial_work.on_partial == "drop"

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
        if not self.is_keyed:
            return tuple(range(self.num_clients))
        clients = self.schedule.in_round(round_number)
        if not self._drops:
            return clients
        left_out = self.stragglers_in(round_number)
        return tuple(client for client in clients if client not in left_out)

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
        if self._is_in_all_rounds:
            return tuple(range(1, self.rounds + 1))
        ends, rounds = self._rounds_by_client
        return tuple(rounds[ends[client] : ends[client + 1]].tolist())

    def planned_rounds(self) -> tuple[int, ...]:
        """Return the number of rounds that each client is charged for."""
        if self._is_in_all_rounds:
            return (self.rounds,) * self.num_clients
        return tuple(np.diff(self._rounds_by_client[0]).tolist())

    @property
    def _is_in_all_rounds(self) -> bool:
        return self.is_secret or (self.schedule.has_all and not self._drops)

    @cached_property
    def _rounds_by_client(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Every client's rounds, client after client, and where each client's begin (N + 1,).

        One pass over the rounds, as each draw takes time for all clients; 4 bytes a participation.
        """
        clients = [np.array(self.in_round(t), np.int32) for t in range(1, self.rounds + 1)]
        rounds = [np.full(len(own), t, np.int32) for t, own in enumerate(clients, start=1)]
        everybody = np.concatenate([*clients, np.empty(0, np.int32)])
        order = np.argsort(everybody, kind="stable")
        counts = np.bincount(everybody, minlength=self.num_clients)
        ends = np.concatenate([[0], np.cumsum(counts)])
        return ends, np.concatenate([*rounds, np.empty(0, np.int32)])[order]


def groups_of(settings: CyclicParticipation, num_clients: int) -> tuple[tuple[int, ...], ...]:
    """Return the clients of each group that takes turns.

    Args:
        settings: the groups.
        num_clients: clients of the federation, at least as many as groups.
    """
    if settings.members is None:
        return equal_groups(num_clients, settings.groups or 1)
    return tuple(
        tuple(client for each in parse_ranges(text) for client in each) for text in settings.members
    )
