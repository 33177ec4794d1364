"""Secure aggregation of an experiment, as far as all its parties must agree on it."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedsim.clients.secure.channel import SecureChannel
from fedsim.core.errors import InputError
from fedsim.experiment import Experiment
from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.hpke import HpkeMissingError, check_hpke
from fedsim.secagg.layout import TensorLayout
from fedsim.secagg.metrics import MetricGrids
from fedsim.secagg.payload import PayloadCodec


class SecureSetupError(InputError):
    """Secure aggregation that cannot start here; the message is one line with the fix."""


def secure_channel(
    experiment: Experiment, state: Mapping[str, Tensor], sizes: Sequence[int]
) -> SecureChannel | None:
    """Return how clients send their updates; None where they are sent in clear.

    Args:
        experiment: with or without `secure_aggregation`.
        state: the model's names and tensors.
        sizes: the examples of every client.

    Raises:
        SecureSetupError: a client weighs more than `max_weight`, or cryptography is too old.
    """
    settings = experiment.secure_aggregation
    if settings is None:
        return None
    if settings.protocol != "quantized":
        try:
            check_hpke()
        except HpkeMissingError as error:
            raise SecureSetupError(str(error)) from error
    weighted = experiment.federation.weighting == "examples"
    clients = experiment.federation.clients_per_round or len(sizes)
    encoder = FixedPointEncoder.from_settings(settings, clients=clients, weighted=weighted)
    if weighted and max(sizes) > encoder.max_weight:
        raise SecureSetupError(
            f"client {sizes.index(max(sizes))} has {max(sizes)} examples, but "
            f"secure_aggregation.max_weight is {encoder.max_weight}; raise it, or use "
            "federation.weighting: uniform"
        )
    layout = TensorLayout.from_arrays({name: one.cpu().numpy() for name, one in state.items()})
    metrics = MetricGrids.of(settings.metrics, encoder)
    return SecureChannel(
        settings, PayloadCodec(encoder, layout, metrics), weighted, experiment.seed
    )
