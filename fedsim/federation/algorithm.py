"""The algorithm of an experiment, checked before the first round."""

from pathlib import Path

from torch import nn

from fedsim.algorithms.algorithm import Algorithm, Training
from fedsim.algorithms.catalog import algorithms
from fedsim.algorithms.registry import AlgorithmError, algorithm_for, check_algorithm
from fedsim.clients.local_settings import SgdSettings
from fedsim.experiment import ExperimentWithClients
from fedsim.experiment.rules.algorithm import check_declaration
from fedsim.experiment.rules.sections import Sections
from fedsim.federation.schedule import participation_of
from fedsim.models.local_base import trained_names
from fedsim.protocol.arrays import to_arrays


def algorithm_of(experiment: ExperimentWithClients, model: nn.Module, base: Path) -> Algorithm:
    """Return a new object of the experiment's algorithm.

    Args:
        experiment: the settings.
        model: the global model; the algorithm changes its trained parameters.
        base: the directory in which relative paths start.

    Raises:
        AlgorithmError: there is no such algorithm, or it does not take its settings.
    """
    optimizer = experiment.local.optimizer
    training = Training(
        parameters=frozenset(trained_names(model)),
        num_clients=experiment.num_clients,
        learning_rate=experiment.local.learning_rate,
        momentum=optimizer.momentum if isinstance(optimizer, SgdSettings) else 0.0,
    )
    return algorithm_for(experiment.federation.algorithm, base=base, training=training)


def checked_algorithm(experiment: ExperimentWithClients, model: nn.Module, base: Path) -> Algorithm:
    """Return the experiment's algorithm; one of the user's own is tried on the initial model.

    Args:
        experiment: the settings.
        model: the initial model.
        base: the directory in which relative paths start.

    Raises:
        AlgorithmError: as `algorithm_of`, a call fails, or it cannot go with the settings.
    """
    algorithm = algorithm_of(experiment, model, base)
    name = experiment.federation.algorithm.name
    if name not in algorithms():  # of a built-in one the rules of the file know it
        sections = Sections.of(dict(experiment), base)
        for path, message in check_declaration(type(algorithm), experiment.federation, sections):
            raise AlgorithmError(f"{'.'.join(map(str, path))}: {message}")
        arrays = {key: value.cpu().numpy() for key, value in model.state_dict().items()}
        per_round, _ = participation_of(experiment).round_sizes
        check_algorithm(algorithm, name, to_arrays(arrays), clients=per_round)
    return algorithm
