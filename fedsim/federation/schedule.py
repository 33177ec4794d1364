"""The participation of an experiment's clients."""

from fedsim.experiment import Experiment
from fedsim.server.participation import Participation


def participation_of(experiment: Experiment, num_clients: int | None = None) -> Participation:
    """Return the participation of an experiment.

    Args:
        experiment: the settings.
        num_clients: number of clients; None: as `data.partition` has them.
    """
    privacy = experiment.privacy
    return Participation.of(
        experiment.federation,
        num_clients=experiment.num_clients if num_clients is None else num_clients,
        seed=experiment.seed,
        private=privacy is not None,
        secure_noise=privacy is not None and privacy.noise == "secure",
    )
