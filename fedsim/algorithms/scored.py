"""The models of a state that are scored on the public test set."""

from collections.abc import Sequence

from flwr.app import ArrayRecord

from fedsim.algorithms.algorithm import Algorithm
from fedsim.algorithms.state import ServerState
from fedsim.protocol.arrays import to_arrays


def scored_models(algorithm: Algorithm, state: ServerState) -> ArrayRecord | Sequence[ArrayRecord]:
    """Return the model of a state, or the clients' own models where an algorithm has them.

    Args:
        algorithm: of the federation.
        state: after a round.
    """
    models = algorithm.scored_models(state)
    if models is None:
        return state.model
    return [to_arrays(dict(model)) for model in models]
