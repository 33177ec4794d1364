"""Set-up of secure aggregation, and the files of the lasting keys of helpers and clients."""

import os
import stat
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from flwr.app import ArrayRecord
from torch import nn

from fedsim.clients.secure.channel import SecureChannel
from fedsim.core.errors import InputError
from fedsim.data import Examples
from fedsim.experiment import ExperimentWithClients
from fedsim.federation.plan import FederationPlan
from fedsim.federation.schedule import participation_of
from fedsim.federation.trained_model import PREFIX
from fedsim.models.catalog import TRAIN_METRICS
from fedsim.models.losses import PerExampleLoss
from fedsim.models.tasks import Task, evaluate
from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.errors import CapacityError, PublicKeyError
from fedsim.secagg.hpke import HpkeMissingError, check_hpke
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.metrics import MetricGrids
from fedsim.secagg.payload import PayloadCodec, TensorLayout
from fedsim.secagg.settings import EncodingSettings, SecureAggregationSettings

HELPER_KEY = "helper-key"  # keys of a SuperNode's --node-config
CLIENT_KEY = "client-key"
_ACCESS_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_lasting_key(path: Path) -> IdentityKey:
    """Write a new key to a file (PEM, PKCS 8) that its owner alone can read, and return the key.

    Raises:
        FileExistsError: the file exists, and overwriting it would destroy a key.
        OSError: the file cannot be written.
    """
    key = IdentityKey.generate()
    private = Ed25519PrivateKey.from_private_bytes(key.to_bytes())
    text = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(text)
    return key


def read_lasting_key(path: Path) -> IdentityKey:
    """Return the lasting key that a file holds.

    Raises:
        PublicKeyError: the file is missing, holds no Ed25519 key, or is readable by other users.
    """
    try:
        mode, text = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise PublicKeyError(
            f"the lasting key {path} cannot be read: {error.strerror}; generate one with "
            f"`fedsim helper-key {path}` or `fedsim client-key {path}`"
        ) from error
    if sys.platform != "win32" and mode & _ACCESS_BY_OTHERS:
        raise PublicKeyError(f"the lasting key is readable by other users; run chmod 600 {path}")
    try:
        private = load_pem_private_key(text, password=None)
    except (ValueError, TypeError) as error:
        raise PublicKeyError(
            f"{path} is not a key of `fedsim helper-key` or `fedsim client-key`"
        ) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise PublicKeyError(
            f"{path} is not a key of `fedsim helper-key` or `fedsim client-key`: not Ed25519"
        )
    return IdentityKey(private)


def identity_of_helper(
    settings: SecureAggregationSettings,
    helper: int,
    *,
    base: Path,
    node_config: Mapping[str, object],
) -> IdentityKey | None:
    """Return a helper's lasting key; None if neither node nor experiment names a key file.

    Args:
        settings: the `secure_aggregation` section.
        helper: number of the helper, from 1.
        base: the directory in which relative paths of the experiment start.
        node_config: configuration of the helper's node; in a simulation it names no key.

    Raises:
        PublicKeyError: the key file cannot be used (see `read_lasting_key`).
    """
    given = node_config.get(HELPER_KEY)
    if given is None and settings.keys.helper_files:
        given = settings.keys.helper_files[helper - 1]
    return None if given is None else read_lasting_key(base / os.path.expanduser(str(given)))


def identity_of_client(
    settings: SecureAggregationSettings,
    client: int,
    *,
    base: Path,
    node_config: Mapping[str, object] | None = None,
) -> IdentityKey | None:
    """Return a client's lasting key; None if the experiment lists (pins) no client keys.

    Args:
        settings: the `secure_aggregation` section.
        client: number of the client, from 0.
        base: the directory in which relative paths of the experiment start.
        node_config: configuration of the client's node; in a simulation it names no key.

    Raises:
        PublicKeyError: the key file is missing or cannot be used (see `read_lasting_key`), or holds
            another key than the pinned one.
    """
    pins, files = settings.keys.client_fingerprints, settings.keys.client_files
    if not pins:
        return None
    given = (node_config or {}).get(CLIENT_KEY, files[client] if files else None)
    if given is None:
        raise PublicKeyError(
            f"client {client} has no lasting key, but keys.client_fingerprints pins "
            f"{pins[client][:16]}...; name its file: client-key in --node-config, or "
            "keys.client_files in a simulation"
        )
    key = read_lasting_key(base / os.path.expanduser(str(given)))
    if key.fingerprint != pins[client]:
        raise PublicKeyError(
            f"the lasting key of client {client} has the fingerprint {key.fingerprint}, but "
            f"keys.client_fingerprints pins {pins[client]}; name the other file, or correct the "
            "pin everywhere"
        )
    return key


class SecureSetupError(InputError):
    """Error of secure aggregation that cannot start; the message names the fix."""


def secure_channel(
    experiment: ExperimentWithClients,
    settings: SecureAggregationSettings,
    upload: ArrayRecord,
    plan: FederationPlan,
    *,
    base: Path,
) -> SecureChannel:
    """Return what clients and server need for secure uploads: settings, encoding, weights and keys.

    Args:
        experiment: the experiment.
        settings: the `secure_aggregation` section of the experiment.
        upload: arrays with the names, shapes and dtypes of an upload.
        plan: the plan of the federation.
        base: the directory in which the experiment's relative paths start.

    Raises:
        SecureSetupError: the sum does not fit into the ring of integers that secure aggregation
            uses, a client weighs more than `max_weight`, planned updates may be above
            `value_bound`, or the installed `cryptography` is too old.
    """
    if settings.protocol.name != "quantized":
        try:
            check_hpke()
        except HpkeMissingError as error:
            raise SecureSetupError(str(error)) from error
    identity_of = partial(identity_of_client, settings, base=base)
    _, per_round = participation_of(experiment).round_sizes
    weights = plan.weights
    if plan.sums is not None:
        codec, planned = _integer_codec(plan.sums, per_round), (1,) * len(weights.values)
        return SecureChannel(settings, codec, planned, experiment.seed, plan.digest, identity_of)
    _check_value_bound(settings.encoding, plan.largest_update)
    try:
        encoder = FixedPointEncoder.from_settings(
            settings.encoding,
            num_clients=per_round,
            weighted=not experiment.federation.weights.is_uniform,
            largest_update=plan.largest_update,
        )
    except CapacityError as error:
        raise SecureSetupError(f"the sum does not fit into the ring: {error}") from error
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
        plan.digest,
        identity_of,
    )


def _check_value_bound(encoding: EncodingSettings, largest: float | None) -> None:
    """Raise an error if a client may be left out of sums for the size of a planned update."""
    given = encoding.value_bound
    if given == "auto" or largest is None or encoding.range_policy == "clip" or given >= largest:
        return
    raise SecureSetupError(
        f"secure_aggregation.encoding.value_bound is {given:g}, but planned updates may reach "
        f"{largest:g} (by learning rate, clipping norm and noise), and a client with a larger "
        "update is left out of the sum; remove value_bound, or set range_policy: clip"
    )


def check_train_metrics(
    names: Mapping[str, float], model: nn.Module, loss: PerExampleLoss, task: Task, public: Examples
) -> None:
    """Check that the task computes every training metric that an experiment declares.

    Args:
        names: the declared metrics: the bound on each metric's value, by name.
        model: the initial model, evaluated on `public`.
        loss: the loss function, which returns one value per example.
        task: the task, which computes metrics from outputs.
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
