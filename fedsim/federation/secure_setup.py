"""The part of secure aggregation that all parties of an experiment must agree on."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from flwr.app import ArrayRecord
from torch import nn

from fedsim.clients.secure.channel import SecureChannel
from fedsim.core.errors import InputError
from fedsim.data import Examples
from fedsim.experiment import ExperimentWithClients
from fedsim.federation.client_tensors import PREFIX
from fedsim.federation.lasting_keys import identity_of_client
from fedsim.federation.schedule import participation_of
from fedsim.models.catalog import TRAIN_METRICS
from fedsim.models.losses import PerExampleLoss
from fedsim.models.metrics import Task, evaluate
from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.errors import CapacityError
from fedsim.secagg.hpke import HpkeMissingError, check_hpke
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.metrics import MetricGrids
from fedsim.secagg.payload import PayloadCodec, TensorLayout
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.aggregation.weights import ClientWeights


class SecureSetupError(InputError):
    """Secure aggregation cannot start; the message is one line with the fix."""


def secure_channel(
    experiment: ExperimentWithClients,
    settings: SecureAggregationSettings,
    upload: ArrayRecord,
    weights: ClientWeights,
    sums: SumPlan | None = None,
    *,
    base: Path,
    plan: str,
) -> SecureChannel:
    """Return encoding and settings of secure uploads.

    Args:
        experiment: the experiment.
        settings: its `secure_aggregation`.
        upload: arrays with the names, shapes and types of an upload.
        weights: the weights of all clients.
        sums: the plan of noisy sums; None: clients send models or their changes.
        base: the directory in which the experiment's relative paths start.
        plan: digest of the privacy plan; "" without privacy.

    Raises:
        SecureSetupError: the sum does not fit into the ring, a client weighs more than
            `max_weight`, or the installed `cryptography` is too old.
    """
    if settings.protocol.name != "quantized":
        try:
            check_hpke()
        except HpkeMissingError as error:
            raise SecureSetupError(str(error)) from error
    identity_of = partial(_identity_of, settings, base)
    _, per_round = participation_of(experiment).round_sizes
    if sums is not None:
        codec, planned = _integer_codec(sums, per_round), (1,) * len(weights.values)
        return SecureChannel(settings, codec, planned, experiment.seed, plan, identity_of)
    weighted = not experiment.federation.weights.is_uniform
    encoder = FixedPointEncoder.from_settings(
        settings.encoding, num_clients=per_round, weighted=weighted
    )
    heaviest = max(weights.values)
    if heaviest > encoder.max_weight:
        raise SecureSetupError(
            f"client {weights.values.index(heaviest)} has weight {heaviest}, its number of "
            f"examples, but secure_aggregation.encoding.max_weight is {encoder.max_weight}; raise "
            "it, or use federation.weighting: uniform"
        )
    layout = TensorLayout.from_arrays(to_numpy(upload))
    metrics = MetricGrids.from_bounds(settings.metrics, encoder)
    return SecureChannel(
        settings,
        PayloadCodec(encoder, layout, metrics),
        weights.values,
        experiment.seed,
        plan,
        identity_of,
    )


def check_train_metrics(
    names: Mapping[str, float], model: nn.Module, loss: PerExampleLoss, task: Task, public: Examples
) -> None:
    """Check that the task has the metrics that an experiment declares.

    Args:
        names: the declared metrics and their bounds.
        model: the initial model, evaluated on `public`.
        loss: one value per example.
        task: scores outputs.
        public: a few public examples.

    Raises:
        SecureSetupError: a metric belongs to another task; the message names the possible ones.
    """
    if not names:
        return
    computed = {PREFIX + name for name in evaluate(model, loss, task, public)}
    possible = [name for name in TRAIN_METRICS if name in computed]
    for name in names:
        if name not in possible:
            raise SecureSetupError(
                f"secure_aggregation.metrics: this task has no {name!r}; choose from "
                f"{', '.join(possible)}"
            )


def _integer_codec(sums: SumPlan, num_clients: int) -> PayloadCodec:
    try:
        return PayloadCodec.of_integers(sums.shapes, bound=sums.bound, num_clients=num_clients)
    except CapacityError as error:
        raise SecureSetupError(
            f"the noisy sum does not fit into the ring: {error}; ask fewer clients, or give the "
            "noise a larger share (a smaller target_epsilon)"
        ) from error


def _identity_of(
    settings: SecureAggregationSettings, base: Path, client: int
) -> IdentityKey | None:
    return identity_of_client(settings, client, base=base)
