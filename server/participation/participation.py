"""Choice of the clients of each round, by a public schedule or a secret draw, and of stragglers.

A public schedule is fixed by the seed and by public settings before the run. So each client's
number of rounds is known in advance, and its noise can be planned. The server knows the schedule
too, so it gives no privacy amplification, and none is claimed.

A Poisson draw includes each client independently. With privacy the draw is secret: only the server
learns who takes part. So every client is charged for every round, drawn or not, and the charge
includes amplification by the draw. If noise is from the operating system, so is the draw; then
there is no schedule.

Stragglers do only a part of their local work (Li et al. 2020, FedProx). The seed determines who
straggles and how many steps a straggler takes, so both are public.
"""

import secrets
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedsim.core.streams import Purpose, stream
from fedsim.noise.correlated.settings import MinSeparation
from fedsim.server.participation.buffered import BufferedSchedule
from fedsim.server.participation.schedules import (
    CyclicSchedule,
    PoissonSchedule,
    Schedule,
    SeparatedSchedule,
    TraceSchedule,
    UniformSchedule,
    even_ranges,
)
from fedsim.server.participation.settings import (
    BufferedParticipation,
    CyclicParticipation,
    DurationTable,
    PartialWorkSettings,
    ParticipationSettings,
    PoissonParticipation,
    SeparatedParticipation,
    TraceParticipation,
    UniformParticipation,
    parse_ranges,
)
from fedsim.server.settings import FederationSettings


@dataclass(frozen=True)
class Stragglers:
    """Random but public choice of the stragglers of each round and their numbers of steps.

    Attributes:
        seed: the experiment's seed.
        share: the fraction of a round's clients that straggle; the number of stragglers is rounded.
    """

    seed: int
    share: float

    def count(self, clients: int) -> int:
        """Return how many of the given number of clients of a round are stragglers."""
        return min(clients, int(self.share * clients + 0.5))

    def among(self, clients: tuple[int, ...], round_number: int) -> frozenset[int]:
        """Return the stragglers of a round, a uniform sample of its clients without replacement.

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
        """Return a straggler's number of local steps, uniform on 1 to `whole` - 1.

        A round of one step cannot be divided, so then the straggler takes that step.

        Args:
            client: the straggler's number.
            round_number: the round >= 1.
            whole: the number of local steps that the client takes in a full round.
        """
        if whole < 2:
            return whole
        # Stream 0 draws the stragglers, so the streams of clients begin at 1.
        key = {"client": client + 1, "round_number": round_number}
        return int(stream(self.seed, Purpose.PARTIAL_WORK, **key).integers(1, whole))


@dataclass(frozen=True)
class Participation:
    """Participation of clients in the rounds of a federation: who takes part when.

    Attributes:
        seed: the experiment's seed.
        num_clients: the number of clients of the federation, N.
        clients_per_round: the largest number k of clients in a round; for Poisson draws, the
            expected number.
        rounds: the number of rounds.
        settings: how the clients of a round are drawn.
        is_secret: whether only the server may learn who takes part in a round.
        is_keyed: whether draws follow from the seed, not from the operating system's randomness.
        partial_work: the settings of stragglers; None for no stragglers.
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
        """Build the participation of an experiment from its settings.

        Args:
            settings: the `federation:` section of the experiment.
            num_clients: the number of clients of the federation.
            seed: the experiment's seed.
            private: whether the experiment has differential privacy.
            secure_noise: whether the noise is from the operating system.
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
        """Name of the participation scheme, such as `uniform`."""
        return self.settings.scheme

    @cached_property
    def schedule(self) -> Schedule:
        """Schedule of the clients of every round; valid only if draws follow from the seed."""
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
            case SeparatedParticipation():
                return SeparatedSchedule(*basis)
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
    def separation(self) -> MinSeparation | None:
        """Bound on distance and number of a client's rounds; None if the scheme sets no bound."""
        match self.settings, self.schedule:
            case SeparatedParticipation(rounds_apart=given), SeparatedSchedule() as schedule:
                return schedule.separation(self.rounds, given)
            case _:
                return None

    @property
    def buffered(self) -> BufferedSchedule | None:
        """Schedule of asynchronous rounds; None if rounds are synchronous."""
        return self.schedule if isinstance(self.schedule, BufferedSchedule) else None

    @cached_property
    def round_sizes(self) -> tuple[int, int]:
        """Smallest number of clients in a non-empty round, and largest number in any round.

        Both are the expected number for Poisson draws. Clients that fail are counted; stragglers
        that `on_partial: drop` removes are not. If they are all clients of the smallest rounds, but
        not of all rounds, the smallest number is given as 1.
        """
        fewest, most = self.schedule.sizes(self.rounds)
        if not self._drops:
            return fewest, most
        count = self.stragglers.count
        left = most - count(most)
        return max(fewest - count(fewest), min(1, left)), left

    @cached_property
    def stragglers(self) -> Stragglers:
        """Random choice of the stragglers and of their numbers of steps."""
        return Stragglers(self.seed, 0.0 if self.partial_work is None else self.partial_work.share)

    def stragglers_in(self, round_number: int) -> frozenset[int]:
        """Return the stragglers of a round, also those that `on_partial: drop` removes from it."""
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
        """Probability that a client takes part in a round: clients_per_round / num_clients."""
        return min(1.0, self.clients_per_round / self.num_clients)

    @property
    def secret_rate(self) -> float | None:
        """Probability that a secret draw takes a client; None if participation is public."""
        return self.rate if self.is_secret else None

    def draw(self, round_number: int) -> tuple[int, ...]:
        """Draw the clients that take part in a round; return them in ascending order.

        Guarantee: a Poisson draw takes each client independently, with probability exactly
        clients_per_round / num_clients. If draws do not follow from the seed, each call is a new
        draw.
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

        These are the participants, or all clients if draws do not follow from the seed.
        """
        if not self.is_keyed:
            return tuple(range(self.num_clients))
        clients = self.schedule.in_round(round_number)
        if not self._drops:
            return clients
        left_out = self.stragglers_in(round_number)
        return tuple(client for client in clients if client not in left_out)

    def on_record(self, round_number: int) -> tuple[int, ...]:
        """Return the participants of a round that the run's records name; none for secret draws."""
        return () if self.is_secret else self.in_round(round_number)

    def charged_in(self, round_number: int) -> tuple[int, ...]:
        """Return the clients that may be charged for a round, ascending; all for secret draws."""
        return tuple(range(self.num_clients)) if self.is_secret else self.in_round(round_number)

    def rounds_of(self, client: int) -> tuple[int, ...]:
        """Return the rounds that a client is charged for, ascending.

        A client is charged for the rounds in which it takes part, or for all rounds if
        participation is secret.
        """
        if self._is_in_all_rounds:
            return tuple(range(1, self.rounds + 1))
        ends, rounds = self._rounds_by_client
        return tuple(rounds[ends[client] : ends[client + 1]].tolist())

    def planned_rounds(self) -> tuple[int, ...]:
        """Return the number of rounds that each client is charged for, by client number."""
        if self._is_in_all_rounds:
            return (self.rounds,) * self.num_clients
        return tuple(np.diff(self._rounds_by_client[0]).tolist())

    @property
    def _is_in_all_rounds(self) -> bool:
        return self.is_secret or (self.schedule.has_all and not self._drops)

    @cached_property
    def _rounds_by_client(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Offsets (N + 1,) of each client's rounds, and the rounds of all clients concatenated.

        One pass over the rounds, as each draw takes time for all clients; 4 bytes a participation.
        """
        clients = [np.array(self.in_round(t), np.int32) for t in range(1, self.rounds + 1)]
        rounds = [np.full(len(members), t, np.int32) for t, members in enumerate(clients, start=1)]
        everybody = np.concatenate([*clients, np.empty(0, np.int32)])
        order = np.argsort(everybody, kind="stable")
        counts = np.bincount(everybody, minlength=self.num_clients)
        ends = np.concatenate([[0], np.cumsum(counts)])
        return ends, np.concatenate([*rounds, np.empty(0, np.int32)])[order]


def groups_of(settings: CyclicParticipation, num_clients: int) -> tuple[tuple[int, ...], ...]:
    """Return the clients of each group, for groups of clients that take turns.

    Args:
        settings: the settings with the members or the number of the groups.
        num_clients: the number of clients of the federation, at least the number of groups.
    """
    if settings.members is None:
        return tuple(map(tuple, even_ranges(num_clients, settings.groups or 1)))
    return tuple(
        tuple(client for numbers in parse_ranges(text) for client in numbers)
        for text in settings.members
    )
