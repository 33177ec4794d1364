"""Mean model of a round from the sum of integer updates, to which the server may add noise.

Clients round their updates to integers, multiples of one public grid step. So the sum is exact,
with or without secure aggregation. Under central trust (the server may see raw sums), the server
adds integer noise to the sum. Scaling, division and the algorithm's step then use only noisy
integers.

Repeated rounds: seeded noise depends on the round. So a second, different sum of the same round
would get the same noise, and the difference of the two sums would be revealed. Before the noise is
drawn, `OpenedSums` writes the clients and a digest of the sum to disk. After a crash at any moment,
the same sum gets the same noise, or the round is aborted.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedsim.core.streams import Purpose, stream_key
from fedsim.noise.correlated.rows import NoiseOfRounds
from fedsim.noise.correlated.strategies import NoiseStrategy
from fedsim.noise.sources import NoiseSource, SecureNoise, SeededNoise
from fedsim.protocol.arrays import to_arrays, to_numpy, upload_base
from fedsim.protocol.messages import TrainReply
from fedsim.protocol.noisy_sums import CLIP_COUNT, SumPlan
from fedsim.secagg.errors import AlreadyAnsweredError
from fedsim.server.aggregation.aggregator import (
    AggregationResult,
    Aggregator,
    InvalidUpdateError,
    RoundAbortedError,
)
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.secure.opened_sums import NO_OPENED_SUMS, OpenedSums

Integers = Mapping[str, np.ndarray]

_DIGEST_BYTES = 32


@dataclass(frozen=True)
class ServerNoise:
    """Noise that the server adds to a sum, with one draw in each round.

    Attributes:
        seed: the experiment's seed; None for noise from the operating system, which never repeats.
        strategy: how the noise is correlated from round to round; None if it is independent.
    """

    seed: int | None
    strategy: NoiseStrategy | None = None

    def source(self, round_number: int) -> NoiseSource:
        """Return the random source from which a round's noise is drawn."""
        if self.strategy is not None:
            return self._correlated.at(round_number)
        return self._fresh(round_number)

    @cached_property
    def _correlated(self) -> NoiseOfRounds:
        """Noise of one round after the other; it keeps its buffers from round to round."""
        if self.strategy is None or self.seed is None:
            raise ValueError("correlated noise needs a strategy, and a seed to be drawn again")
        return NoiseOfRounds(self.strategy, self._fresh)

    def _fresh(self, round_number: int) -> NoiseSource:
        """Return the source of the independent noise of a round."""
        if self.seed is None:
            return SecureNoise()
        return SeededNoise(stream_key(self.seed, Purpose.SERVER_NOISE, round_number=round_number))

    def digest(self, round_number: int, sums: Integers) -> str:
        """Return a keyed digest of a round's sums, or "" if the noise never repeats.

        Args:
            round_number: the round, from 1.
            sums: int64 arrays by name, before noise is added.
        """
        if self.seed is None:
            return ""
        key = stream_key(self.seed, Purpose.SUM_DIGEST, round_number=round_number)
        state = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=key)
        for name, value in sums.items():
            state.update(f"{len(name)}:{name}{value.shape}".encode())
            state.update(np.ascontiguousarray(value, "<i8").tobytes())
        return state.hexdigest()


class NoisySum(Aggregator[Any]):
    """Aggregator for integer updates: their weighted mean, with the server's noise if planned.

    Guarantee: with `plan.server_noise` the result is a function of Σ + Z, where Σ is the sum of the
    clients' integers. Z are independent rounded normals of standard deviation 2²⁴, drawn once for
    the round, or the round's row of correlated noise. The client set and a digest of Σ are on disk
    before Z is drawn. A round whose sum differs from the recorded sum is aborted.

    Edge cases:

    | case                                       | result                                       |
    |--------------------------------------------|----------------------------------------------|
    | no client, a public divisor                | noise over the divisor                       |
    | no client, no public divisor               | no model: participation is public            |
    | given up, and noise is correlated          | noise over the divisor                       |
    | given up otherwise                         | no model                                     |
    | weights of the participants add up to 0    | no model                                     |

    Args:
        sums: the aggregator that adds up the clients' integers.
        plan: the value of the integer 1 in the sum, the divisor of the sum, and who adds the noise.
        weights: the aggregation weights of all clients.
        noise: the server's noise; unused if clients add the noise.
        opened_sums: the record of sums that already got noise, in this or an earlier process.
        secret: whether only the server may know the participants; then no record names a client.
        tied: for tied weights, the name of the other parameter with the same values. Tied tensors
            have one sum and one noise draw; a second draw would reveal more of them.
    """

    def __init__(
        self,
        sums: Aggregator[Any],
        plan: SumPlan,
        weights: ClientWeights,
        noise: ServerNoise,
        *,
        opened_sums: OpenedSums = NO_OPENED_SUMS,
        secret: bool = False,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"{sums.name}, {weights.name} weights"
        self.reply_type, self.declared_metrics = sums.reply_type, sums.declared_metrics
        self.ends_run_on_abort = sums.ends_run_on_abort
        self._sums, self._plan, self._weights = sums, plan, weights
        self._noise, self._opened_sums, self._secret = noise, opened_sums, secret
        self._tied = tied or {}
        self._round_number = 0
        self._reference: dict[str, np.ndarray] = {}
        self._scale = 1.0
        self._added: set[int] = set()

    def begin(
        self, round_number: int, arrays: ArrayRecord, clients: Sequence[int], grid: Grid
    ) -> ConfigRecord | None:
        """Begin a round; return extra fields for its train requests, or None for no extra fields.

        Raises:
            RoundAbortedError: the aggregator that adds up the integers aborts the round.
        """
        self._round_number, self._added = round_number, set()
        self._reference = to_numpy(upload_base(arrays))
        offer = self._sums.begin(round_number, arrays, clients, grid)
        self.retried = self._sums.retried
        return offer

    def add(self, client: int, answer: Any) -> None:
        """Add a client's integers to the sum.

        Raises:
            InvalidUpdateError: the integers do not fit the plan, or an earlier process already
                added this round's noise to a sum that lacks the client.
        """
        admissible = None
        if self._plan.server_noise and not self._secret:
            admissible = self._opened_sums.admissible_clients(self._round_number)
        if admissible is not None and client not in admissible:
            raise InvalidUpdateError(
                "it was not in the sum of this round that got noise before the run was "
                "interrupted; it takes part again in the next round"
            )
        self._sums.add(client, answer)
        self._added.add(client)

    def skip(self, client: int) -> None:
        """Leave a client out of the sum."""
        self._sums.skip(client)

    def finish(self) -> AggregationResult:
        """Return the mean model from the noisy sum.

        Raises:
            RoundAbortedError: there is no sum, or an earlier process added this round's noise to
                another sum.
        """
        try:
            result = self._sums.finish()
        finally:
            self.retried = self._sums.retried
        clients = self._added - result.lost.keys()
        divisor = self._plan.divisor
        if divisor is None:
            divisor = float(sum(self._weights.values[client] for client in clients))
        sums = result.sums
        if sums is None and self._plan.divisor is not None:
            sums = self._zeros()
        if sums is None or divisor == 0.0:
            return replace(result, sums=None)
        return self._released(result, clients, sums, divisor)

    def give_up(self) -> AggregationResult:
        """Return the model with a round's noise alone, which later rounds cancel; else nothing.

        The noise of round t cancels a part of the noise of earlier rounds. If a round without a sum
        also had no noise, later rounds would cancel noise that no model has.
        """
        divisor, nothing = self._plan.divisor, AggregationResult(None)
        if self._noise.strategy is None or divisor is None or self.ends_run_on_abort:
            return nothing
        try:
            return self._released(nothing, set(), self._zeros(), divisor)
        except RoundAbortedError:  # an earlier process may have added this noise to a sum
            return nothing

    def _zeros(self) -> Integers:
        return {name: np.zeros(shape, np.int64) for name, shape in self._plan.shapes.items()}

    def _released(
        self, result: AggregationResult, clients: set[int], sums: Integers, divisor: float
    ) -> AggregationResult:
        """Return a result with the mean model from sums, to which the planned noise is added."""
        if self._plan.server_noise:
            self._record(clients, sums)
            untied = {name: value for name, value in sums.items() if name not in self._tied}
            sums = add_noise(untied, self._noise.source(self._round_number))
        return replace(
            result,
            arrays=to_arrays(self._mean_model(sums, divisor)),
            sums=None,
            clip_count=None if CLIP_COUNT not in sums else int(sums[CLIP_COUNT].item()),
        )

    def scale(self, clip_norm: float | None) -> None:
        """Set the clip norm S of the next round's updates; the integer 1 means S · `plan.unit`."""
        self._scale = 1.0 if clip_norm is None else clip_norm

    def _record(self, clients: set[int], sums: Integers) -> None:
        if self._secret and self._noise.seed is None:
            return  # each attempt draws new clients and new noise, and is charged anew
        try:
            self._opened_sums.record_opening(
                self._round_number,
                () if self._secret else clients,
                self._noise.digest(self._round_number, sums),
            )
        except AlreadyAnsweredError as error:
            raise RoundAbortedError(
                "before the run was interrupted, noise was added to another sum of this round; the "
                "same noise on a second sum would reveal their difference, so the round is given up"
            ) from error

    def _mean_model(self, sums: Integers, divisor: float) -> dict[str, np.ndarray]:
        """Return the global model plus the mean update, in the types of the model."""
        step = self._plan.unit * self._scale / divisor
        model = dict(self._reference)
        for name in self._plan.shapes:
            if name != CLIP_COUNT and name not in self._tied:
                start = self._reference[name]
                moved = start.astype(np.float64) + step * sums[name]
                model[name] = np.asarray(moved, dtype=start.dtype)
        for name, owner in self._tied.items():
            model[name] = model[owner]
        return model


def add_noise(sums: Integers, source: NoiseSource) -> dict[str, np.ndarray]:
    """Return integer sums plus integer noise, with one noise draw for all tensors together.

    Args:
        sums: int64 arrays by name.
        source: the noise source of this release, used for no other release.
    """
    size = sum(value.size for value in sums.values())
    drawn = source.fill_(torch.empty(size, dtype=torch.float64)).numpy().astype(np.int64)
    noisy, start = dict[str, np.ndarray](), 0
    for name, value in sums.items():
        share = drawn[start : start + value.size].reshape(value.shape)
        noisy[name] = np.asarray(value + share)  # numpy makes a scalar of two arrays without axes
        start += value.size
    return noisy


_CAPACITY = 1 << 62  # largest |sum| in int64 that leaves room for the server's noise


class IntegerSum(Aggregator[TrainReply]):
    """Aggregator that adds up the clients' integer updates, which the server can read one by one.

    The sum is exact, so the order of the clients does not matter.

    Args:
        plan: the plan with the names, shapes and largest absolute value of a client's integers.
        num_clients: the largest number of clients in one sum.

    Raises:
        ValueError: a sum of so many clients could exceed int64.
    """

    reply_type = TrainReply
    name = "sums of integers"

    def __init__(self, plan: SumPlan, *, num_clients: int) -> None:
        if plan.bound * num_clients > _CAPACITY:
            raise ValueError(
                f"{num_clients} clients with integers of up to {plan.bound} do not fit into an "
                "int64 sum; ask fewer clients, or give the noise a larger share"
            )
        self._plan = plan
        self._sums: dict[str, np.ndarray] = {}
        self._added = 0

    def begin(
        self, round_number: int, arrays: ArrayRecord, clients: Sequence[int], grid: Grid
    ) -> ConfigRecord | None:
        """Begin a round; train requests get no extra fields, so the result is None."""
        shapes = self._plan.shapes.items()
        self._sums = {name: np.zeros(shape, np.int64) for name, shape in shapes}
        self._added = 0
        return None

    def add(self, client: int, answer: TrainReply) -> None:
        """Add a client's integers to the sum.

        Raises:
            InvalidUpdateError: a name, shape or dtype is wrong, or an integer exceeds the plan's
                bound.
        """
        check_integers(answer.arrays, self._plan)
        for name, total in self._sums.items():
            total += answer.arrays[name]
        self._added += 1

    def finish(self) -> AggregationResult:
        """Return a result whose `sums` add up the clients' integers (None without any client)."""
        return AggregationResult(None, sums=self._sums if self._added else None)


def check_integers(values: Mapping[str, np.ndarray], plan: SumPlan) -> None:
    """Check that a client's integers have the planned layout and do not exceed the bound.

    Args:
        values: the client's int64 arrays by name.
        plan: the plan with the names, shapes and largest absolute value to check against.

    Raises:
        InvalidUpdateError: a name, shape or dtype is wrong, or an integer exceeds the bound.
    """
    if list(values) != list(plan.shapes):
        missing = [name for name in plan.shapes if name not in values]
        extra = [name for name in values if name not in plan.shapes]
        raise InvalidUpdateError(f"arrays differ: missing {missing}, unexpected {extra}")
    for name, value in values.items():
        shape = plan.shapes[name]
        if value.dtype != np.int64 or value.shape != tuple(shape):
            raise InvalidUpdateError(
                f"array {name!r} must be int64{list(shape)}, got {value.dtype}{list(value.shape)}"
            )
        # Not by |value|: the smallest int64 has none.
        if value.size and not -plan.bound <= int(value.min()) <= int(value.max()) <= plan.bound:
            raise InvalidUpdateError(f"array {name!r} has an integer beyond ±{plan.bound}")
