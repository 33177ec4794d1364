"""PATE's mechanism: clients (teachers) vote on public queries, with noise, in one ballot a round.

Ballots alternate. In the check, in odd rounds, clients vote on every query of a batch, and the
noisy counts show on which queries the teachers agree. In the vote, in even rounds, they vote on
these queries. The noisy sum of a ballot is a noisy histogram for each of its queries.

Source: Papernot, Song, Mironov, Raghunathan, Talwar, Erlingsson 2018, "Scalable Private Learning
with PATE", arXiv:1802.08908, Algorithm 1 (Confident-GNMax); here
the whole noisy histogram is released.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.accountant import Event, Gaussian
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.client_update import UpdateMechanism
from fedsim.clients.mechanisms.plan import (
    Draft,
    PlanRequest,
    PrivacyPlan,
    PrivacyPlanError,
    check_draws,
)
from fedsim.clients.mechanisms.votes.ballots import Ballot, Ballots
from fedsim.clients.sampling.sampling import Charges, PoissonSampling, Sampling
from fedsim.clients.task import ClientTask
from fedsim.clients.training.member import StreamKey
from fedsim.noise.release import NoiseRangeError
from fedsim.noise.sources import DEVIATION, NoiseSource, NoNoise
from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.messages import TrainRequest

NO_LABEL = -1
"""The label of a row of a ballot in which a client does not vote."""

MAX_DEVIATION = 2.0**17
"""Largest standard deviation of the noise on a count, in votes: one vote then is 128 grid steps."""

MIN_DEVIATION = 2.0**-17

_ROUNDED_DOWN = 1.0 - 2.0**-40  # more than the few operations of a formula may round up


_NO_BALLOTS = Ballots(Ballot(0, 1.0), Ballot(0, 1.0))


@dataclass(frozen=True)
class VoteMechanism(UpdateMechanism):
    """Mechanism that releases a client's one-hot votes on public queries, as integers with noise.

    In a ballot, clients vote on m queries. Each count gets noise of standard deviation z σ votes,
    with noise multiplier z and the σ of the ballot.

    Guarantee: the release of a ballot is m Gaussian releases of noise multiplier z σ / √2, each on
    the counts of one query. This holds for any change of the client's data, and for a client that
    is zeroed out.

    Proof. A vote adds c = ⌊2²⁴ / (z σ)⌋ to one integer of its query and 0 to the others; the noise
    is a rounded normal of deviation 2²⁴ on each. Another teacher moves the integers of a query by
    the difference of two such vectors: at most two integers by c each, √2 c in L2 norm. A client
    that is zeroed out votes for nothing: one integer moves by c ≤ √2 c. For integers f, f + rint(N)
    = rint(f + N), so the release of a query is a function of a Gaussian release with multiplier
    2²⁴ / (√2 c) ≥ z σ / √2. The queries have independent noise; which of them a ballot asks follows
    from earlier releases, and their number is at most m, fixed beforehand. So the ballots of a run
    compose as m releases each, however many queries are asked. ∎

    Attributes:
        ballots: sizes and noise of the two alternating ballots.
        round_number: number of the round that this mechanism is for, or None if it is for a whole
            run from round 1 on.
    """

    ballots: Ballots = _NO_BALLOTS
    round_number: int | None = None

    def of_round(self, round_number: int) -> Self:
        """Return the mechanism for the ballot of one round."""
        return replace(self, round_number=round_number)

    @property
    def mechanism(self) -> Event:
        """Privacy event of a client's noisy votes on one query of the ballot."""
        return self._event(self.ballots.of_round(self.round_number or 1), 1.0)

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier of the Gaussian release that costs as much as both ballots together."""
        return self.noise_multiplier / math.sqrt(self.cost(2))

    def cost(self, rounds: int) -> float:
        """Return the privacy cost of the first `rounds` ballots: Σ 2 / σ² over all their queries.

        Here σ is the standard deviation of the noise on a count at noise multiplier 1, in votes.
        With noise multiplier z, all releases compose to one Gaussian release with noise multiplier
        z / √cost.

        Args:
            rounds: number of ballots.
        """
        ballots = [self.ballots.of_round(number) for number in range(1, rounds + 1)]
        return math.fsum(2.0 * ballot.queries / ballot.deviation**2 for ballot in ballots)

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return the privacy events of a client's ballots: one event for each query of a ballot.

        Args:
            first_step: number of earlier ballots; ignored if `round_number` is set.
            steps: number of further ballots.
            noise_factor: standard deviation of the noise that an adversary faces, divided by that
                of the release alone; above 1 where only a noisy sum is visible.

        Returns:
            (event, count) pairs.
        """
        first = first_step + 1 if self.round_number is None else self.round_number
        counts = dict[Ballot, int]()
        for number in range(first, first + steps):
            ballot = self.ballots.of_round(number)
            counts[ballot] = counts.get(ballot, 0) + ballot.queries
        return [(self._event(kind, noise_factor), count) for kind, count in counts.items()]

    def equivalent(self, steps: int) -> tuple[Sampling, int, float]:
        """Return (sampling, 1, ratio): all ballots cost as much as one Gaussian release.

        The ratio is the votes' noise multiplier divided by that of this release, unsampled.
        """
        return PoissonSampling(1.0), 1, math.sqrt(self.cost(steps))

    def for_model(self, parameters: FlatParameters) -> Self:
        """Return the mechanism, after a check that the integer grid can hold the noise on a count.

        Args:
            parameters: the vote counts, one for each query and class.

        Raises:
            NoiseRangeError: the noise on a count is too small or too large for the grid.
        """
        for ballot in (self.ballots.check, self.ballots.vote):
            deviation = self.noise_multiplier * ballot.deviation
            if not MIN_DEVIATION <= deviation <= MAX_DEVIATION:
                raise NoiseRangeError(
                    f"the noise on a count has a standard deviation of {deviation:.3g} votes, and "
                    f"the grid takes {MIN_DEVIATION:.2g} to {MAX_DEVIATION:.3g}; change "
                    "privacy.noise_multiplier, pate.sigma or pate.sigma_threshold"
                )
        return replace(self, dimensions=parameters.size)

    def with_effective_noise(self, noise_multiplier: float) -> Self:
        """Return the mechanism with another noise multiplier; rounding votes costs no privacy."""
        return replace(self, noise_multiplier=noise_multiplier)

    def vote_steps(self, round_number: int) -> int:
        """Return how many steps of the integer grid one vote adds to a count in the given round."""
        deviation = self.noise_multiplier * self.ballots.of_round(round_number).deviation
        return math.floor(DEVIATION / deviation * _ROUNDED_DOWN)

    @property
    def largest_integer(self) -> int:
        """Largest integer that a client releases in a ballot, before noise is added."""
        return max(self.vote_steps(number) for number in (1, 2))

    def _event(self, ballot: Ballot, noise_factor: float) -> Event:
        deviation = noise_factor * self.noise_multiplier * ballot.deviation
        return Gaussian(deviation / math.sqrt(2.0))


def release_votes(
    labels: NDArray[np.int64], classes: int, *, vote: int, noise: NoiseSource
) -> NDArray[np.float64]:
    """Return one-hot votes plus noise, whole numbers in float64 (rows · classes,).

    Args:
        labels: the class that the client votes for in each row (query) of the ballot (rows,);
            `NO_LABEL` where it does not vote.
        classes: number of classes.
        vote: number of integer-grid steps that a vote adds to its count.
        noise: the client's noise source; it gives zeros where another party adds the noise.
    """
    votes = torch.zeros(len(labels), classes, dtype=torch.float64)
    rows = np.flatnonzero(labels != NO_LABEL)
    votes[torch.from_numpy(rows), torch.from_numpy(labels[rows])] = float(vote)
    drawn = noise.fill_(torch.empty(votes.numel(), dtype=torch.float64))
    return (votes.flatten() + drawn).numpy()


def draft(request: PlanRequest) -> Draft:
    """Return the privacy plan, before noise calibration, of a client that votes in every round.

    Args:
        request: the client's settings and rounds; its `problem` is the `Ballots`, and its
            `parameters` are the vote counts.

    Raises:
        TypeError: the `problem` of the request is not of type `Ballots`.
    """
    privacy, rounds, parameters = request.privacy, request.planned_rounds, request.parameters
    if not isinstance(request.problem, Ballots):
        raise TypeError(f"votes need ballots, got {request.problem!r}")
    like = VoteMechanism(1.0, 1.0, ballots=request.problem)

    def build(noise: float) -> VoteMechanism:
        if noise == 0.0:
            raise PrivacyPlanError(
                "privacy.noise_multiplier 0 adds no noise to any vote; use privacy: null for votes "
                "without privacy"
            )
        release = replace(like, noise_multiplier=noise)
        if parameters is None:
            return release
        check_draws(rounds * parameters.size)
        try:
            return release.for_model(parameters)
        except ValueError as error:
            raise PrivacyPlanError(f"the votes cannot be released: {error}") from error

    return Draft(
        examples=0,
        steps=rounds,
        given=privacy.noise_multiplier,
        like=like,
        build=build,
        hint="; ask fewer pate.queries, or set more pate.sigma and pate.sigma_threshold",
    )


def votes_of(task: ClientTask, request: TrainRequest) -> NDArray[np.generic]:
    """Return the noisy votes that a client uploads for a ballot, flat (queries · classes,).

    Args:
        task: the client's task, with a voter (the object that predicts labels).
        request: the server's request, with the round and the public results of earlier ballots.

    Raises:
        ValueError: the task has no voter.
        TypeError: the task's privacy plan is not for votes.
    """
    number, voter = request.round_number, task.training.voter
    if voter is None:
        raise ValueError("the client trains, it does not vote")
    answers = to_numpy(request.arrays)
    labels = voter.labels(task.client, task.data.tensors(), number, answers)
    key = StreamKey(task.run.seed, task.client, number)
    return noisy_votes(labels, voter.classes, task.privacy, key)


def noisy_votes(
    labels: NDArray[np.int64], classes: int, plan: PrivacyPlan | None, key: StreamKey
) -> NDArray[np.generic]:
    """Return the flat votes that a client uploads for its labels, with noise (rows · classes,).

    Guarantee: with privacy the result is a function of one release of the plan's `VoteMechanism`:
    integers for a noisy sum, otherwise these integers times the length of an integer-grid step.

    Args:
        labels: the class that the client votes for in each row (query) of the ballot (rows,);
            `NO_LABEL` where it does not vote.
        classes: number of classes.
        plan: the client's privacy plan, or None for votes without noise.
        key: key of the client's random streams in the round.

    Raises:
        TypeError: the plan is not for votes.
    """
    if plan is None:
        return release_votes(labels, classes, vote=1, noise=NoNoise()).astype(np.float32)
    release = plan.release_as(VoteMechanism)
    noise = key.noise(secure=plan.secure_noise, part=plan.part)
    vote = release.vote_steps(key.round_number)
    votes = release_votes(labels, classes, vote=vote, noise=noise)
    return votes if plan.part is not None else (votes * release.update_step).astype(np.float32)
