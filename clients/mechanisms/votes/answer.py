"""A client's answer to a ballot: its teacher's votes, with its noise, in place of an update."""

import numpy as np
from numpy.typing import NDArray

from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.mechanisms.votes.mechanism import VoteMechanism, release_votes
from fedsim.clients.task import ClientTask
from fedsim.clients.training.streams import StreamKey
from fedsim.noise.sources import NoiseSource, NoNoise
from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.messages import TrainRequest


def votes_of(task: ClientTask, request: TrainRequest) -> NDArray[np.generic]:
    """Return a client's votes of a ballot (rows · classes,), flat as the values of an update.

    Args:
        task: of the client, with a voter.
        request: the round and the board.

    Raises:
        ValueError: the task has no voter.
        TypeError: its plan is none for votes.
    """
    number, voter = request.round_number, task.training.voter
    if voter is None:
        raise ValueError("the client trains, it does not vote")
    board = to_numpy(request.arrays)
    labels = voter.labels(task.client, task.data.tensors(), number, board)
    key = StreamKey(task.run.seed, task.client, number)
    return noisy_votes(labels, voter.classes, task.privacy, key)


def noisy_votes(
    labels: NDArray[np.int64], classes: int, plan: PrivacyPlan | None, key: StreamKey
) -> NDArray[np.generic]:
    """Return what leaves a client for its labels (rows · classes,).

    Guarantee: with privacy the result is a function of one release of the plan's `VoteMechanism`:
    integers of the grid for a noisy sum, else these times the length of a step.

    Args:
        labels: class that the client votes for in each row (rows,); `NO_LABEL`: no vote.
        classes: number of classes.
        plan: of the client; None: votes without noise.
        key: of the client's streams in the round.

    Raises:
        TypeError: the plan is none for votes.
    """
    if plan is None:
        return release_votes(labels, classes, vote=1, noise=NoNoise()).astype(np.float32)
    release = plan.release_as(VoteMechanism)
    noise: NoiseSource = key.noise(secure=plan.secure_noise)
    if plan.part is not None and not plan.part.adds_noise:
        noise = NoNoise()
    vote = release.vote_steps(key.round_number)
    votes = release_votes(labels, classes, vote=vote, noise=noise)
    return votes if plan.part is not None else (votes * release.update_step).astype(np.float32)
