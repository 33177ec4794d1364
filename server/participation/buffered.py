"""Asynchronous rounds on a simulated clock: FedBuff (Nguyen et al. 2022, algorithm 1).

`concurrency` clients train at the same time. A client that finishes puts its update into the
server's buffer. The server then draws another client uniformly and starts it from the current
model. When the buffer holds `buffer_size` updates, the server applies them: that is a round. A
client may have started some rounds earlier. If s rounds were applied while it trained, its update
has staleness s and is scaled by (1 + s)^(-1/2).

The schedule depends only on the seed and public settings. Training times are simulated, so they
depend on no data and no machine. The whole schedule is therefore known before round 1.

A client is in a buffer at most once, so it has one training, one charge and one noise draw in a
round. For this, the server starts only clients that neither train nor wait in the buffer.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsim.core.streams import Purpose, stream
from fedsim.server.participation.settings import DurationDistribution


@dataclass(frozen=True)
class BufferedRound:
    """An asynchronous round: one full buffer of updates.

    Attributes:
        clients: the clients whose updates are in the buffer, ascending.
        starts: for each of these clients, the round whose global model the client started from; 0
            stands for the initial model.
        time: the simulated time at which the buffer was full, in the unit of the training times.
        pending: the rounds whose global models other clients still train from.
    """

    clients: tuple[int, ...]
    starts: tuple[int, ...]
    time: float
    pending: frozenset[int] = frozenset()

    def start_of(self, client: int) -> int:
        """Return the round that produced the global model from which a client started."""
        return self.starts[self.clients.index(client)]


@dataclass(frozen=True)
class BufferedSchedule:
    """Schedule of asynchronous rounds.

    Guarantee: a round depends on these attributes alone, and later rounds do not change it.

    Attributes:
        seed: the experiment's seed.
        num_clients: the number of clients of the federation, N.
        concurrency: the number of clients that train at the same time, <= N.
        buffer_size: the number of updates in a round, <= N.
        durations: the distribution of simulated training times, or one time > 0 for each client.
    """

    seed: int
    num_clients: int
    concurrency: int
    buffer_size: int
    durations: DurationDistribution | tuple[float, ...] = "half_normal"

    has_all = False

    def in_round(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round, in ascending order."""
        return self.round(round_number).clients

    def sizes(self, rounds: int) -> tuple[int, int]:
        """Return the smallest and largest number of clients of a round; both are `buffer_size`."""
        return self.buffer_size, self.buffer_size

    def round(self, round_number: int) -> BufferedRound:
        """Return round `round_number` >= 1; the first call simulates all rounds up to it."""
        return self._clock.round(round_number)

    @cached_property
    def _clock(self) -> "_Clock":
        return _Clock(self)


class _Clock:
    """Simulates which clients train, which wait in the buffer, and when each training ends."""

    def __init__(self, schedule: BufferedSchedule) -> None:
        self._schedule = schedule
        # The stream of round 0, unused by other schemes. One stream, as events are ordered.
        self._generator = stream(schedule.seed, Purpose.PARTICIPATION)
        self._idle = np.arange(schedule.num_clients)
        self._num_idle = schedule.num_clients
        self._training: list[tuple[float, int, int, int]] = []  # end, order, client, start
        self._buffer: list[tuple[int, int]] = []  # client, start
        self._order = 0
        self._rounds: list[BufferedRound] = []
        self._start_clients(0.0)

    def round(self, round_number: int) -> BufferedRound:
        while len(self._rounds) < round_number:
            self._next_end()
        return self._rounds[round_number - 1]

    def _next_end(self) -> None:
        """Advance the clock to the end of the next training, and start other clients."""
        time, _, client, start = heapq.heappop(self._training)
        self._buffer.append((client, start))
        if len(self._buffer) == self._schedule.buffer_size:
            ordered = sorted(self._buffer)
            clients, starts = zip(*ordered, strict=True)
            pending = frozenset(start for _, _, _, start in self._training)
            self._rounds.append(BufferedRound(clients, starts, time, pending))
            for member, _ in self._buffer:
                self._idle[self._num_idle] = member
                self._num_idle += 1
            self._buffer.clear()
        self._start_clients(time)

    def _start_clients(self, time: float) -> None:
        """Start idle clients, each as likely as another, until enough clients train."""
        while len(self._training) < self._schedule.concurrency and self._num_idle:
            place = int(self._generator.integers(self._num_idle))
            client = int(self._idle[place])
            self._num_idle -= 1
            self._idle[place] = self._idle[self._num_idle]
            end = time + self._duration(client)
            heapq.heappush(self._training, (end, self._order, client, len(self._rounds)))
            self._order += 1

    def _duration(self, client: int) -> float:
        durations = self._schedule.durations
        if not isinstance(durations, str):
            return durations[client]
        if durations == "constant":
            return 1.0
        if durations == "exponential":
            return float(self._generator.exponential())
        return abs(float(self._generator.normal()))
