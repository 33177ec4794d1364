"""A client's answer to a ballot: its teacher's votes, with its noise, in place of an update."""

import numpy as np
from numpy.typing import NDArray

from fedsim.clients.task import ClientTask
from fedsim.clients.training.streams import StreamKey
from fedsim.clients.updates.votes import VoteMechanism, release_votes
from fedsim.noise.sources import NoiseSource, NoNoise
from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.messages import TrainRequest


def votes_of(task: ClientTask, request: TrainRequest) -> NDArray[np.generic]:
    """Return a client's votes of a ballot (rows · classes,), flat as the values of an update.

    Guarantee: with privacy they are a function of one release of the client's `VoteMechanism`:
    integers of the grid for a noisy sum, else these times the length of a step.

    Args:
        task: of the client, with a voter.
        request: the round and the board.

    Raises:
        ValueError: the task has no voter, or its plan is none for votes.
    """
    plan, number = task.privacy, request.round_number
    if task.voter is None:
        raise ValueError("the client trains, it does not vote")
    board = to_numpy(request.arrays)
    labels = task.voter.labels(task.client, task.data(), number, board)
    classes = task.voter.classes
    if plan is None:
        votes = release_votes(labels, classes, vote=1, noise=NoNoise())
        return votes.astype(np.float32)
    release = plan.release
    if not isinstance(release, VoteMechanism):
        raise ValueError("a client that votes needs a plan for votes")
    noise: NoiseSource = StreamKey(task.seed, task.client, number).noise(secure=plan.secure_noise)
    if plan.part is not None and not plan.part.adds_noise:
        noise = NoNoise()
    votes = release_votes(labels, classes, vote=release.vote_steps(number), noise=noise)
    return votes if plan.part is not None else (votes * release.update_step).astype(np.float32)
