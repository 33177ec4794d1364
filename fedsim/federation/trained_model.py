"""The model of a federation and its clients' examples, on the device that trains.

Every process builds the same initial values. All clients of a process train on one copy of the
model, one client after the other. Before round 1 the model is checked on public examples, which are
the first examples of the server's test set. It is never checked on private examples.

The tensors of a client's examples are built when the client trains. Training metrics, such as
`train_loss`, evaluate on them the model from which a round starts. Clients send them by secure
aggregation. The mean of `train_loss` over clients, weighted by their examples, is the loss that the
federation minimizes.
"""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.clients.gradients.choice import training_gradients
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import PerExampleGradients, PerExampleLoss
from fedsim.clients.gradients.slopes import SharedCoefficients, Slopes
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.errors import InputError
from fedsim.data import Examples, FederatedData
from fedsim.data.examples import digest_examples
from fedsim.data.load import ClientExamples
from fedsim.experiment import Experiment
from fedsim.federation.first_checks import (
    StillParameter,
    parameters_without_effect,
    still_parameters,
)
from fedsim.models.build import build_model
from fedsim.models.local_base import RebuiltModel, local_base
from fedsim.models.tasks import Task, evaluate

NUM_CHECK_EXAMPLES = 3
"""Public examples that check a model and choose how its per-example gradients are computed."""

NUM_PROBE_EXAMPLES = 64
"""Public examples on which vectorized clients are compared with clients trained alone."""
_CACHE_BYTES = 4 << 30
_SMALL_DATA_BYTES = 1 << 30  # data up to this size are copied without asking whether it pays
# Gathering up to this many times the examples of a round's batches costs a tenth of the round.
_MAX_GATHER_FACTOR = 4


def initial_model(
    experiment: Experiment, data: FederatedData, task: Task, *, base: Path
) -> nn.Module:
    """Return the initial model of an experiment.

    Args:
        experiment: the settings; their seed determines the weights.
        data: the data, which give the input shape.
        task: the task, which gives the number of outputs.
        base: the directory in which the experiment's relative paths start.

    Guarantee: the weights are the same in every process.
    """
    model = build_model(
        experiment.model,
        input_shape=data.input_shape,
        num_outputs=task.num_outputs,
        seed=experiment.seed,
        base=base,
    )
    local = experiment.local
    if local.zeroth_order is not None:
        rebuilt = RebuiltModel(
            model, local.zeroth_order, seed=experiment.seed, steps=local.given_steps
        )
        rebuilt.attach(model)
    return model


def model_arrays(model: nn.Module) -> ArrayRecord:
    """Return those values of a model that are sent in messages, as a Flower record."""
    return ArrayRecord({name: value.cpu() for name, value in model.state_dict().items()})


def public_examples(data: FederatedData, num_examples: int) -> Examples:
    """Return a copy of the first `num_examples` examples of the public test set, or of all."""
    return data.test.rows(np.arange(min(num_examples, len(data.test))))


def to_tensors(examples: Examples, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the features (n, ...) and the targets (n, ...) as tensors on a device."""
    features, targets = torch.from_numpy(examples.features), torch.from_numpy(examples.targets)
    return features.to(device), targets.to(device)


@dataclass(frozen=True)
class FederationModel:
    """The model of a federation, and what is needed to train and evaluate the model.

    Attributes:
        module: the initial model; rounds overwrite its values.
        shared: the model that all clients of this process train, one client after the other; with
            `task: pate`, the record of the answers to the queries that clients vote on.
        loss: the loss function, which returns one value per example.
        gradients: the method for per-example gradients of the model; None if training uses torch's
            autograd, without privacy.
        task: the kind of prediction (such as classification), which gives targets and metrics.
        device: the device that trains.
        still: the trainable parameters that two test steps on public examples did not change.
    """

    module: nn.Module
    shared: SharedModel
    loss: PerExampleLoss
    gradients: PerExampleGradients | None
    task: Task
    device: torch.device
    still: tuple[StillParameter, ...] = ()


def federation_model(
    experiment: Experiment,
    module: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    features: Tensor,
    targets: Tensor,
) -> FederationModel:
    """Return a model with the method for its per-example gradients, and the copy to be trained.

    Args:
        experiment: the settings.
        module: the initial model, on the training device.
        loss: the loss function, which returns one value per example.
        task: the kind of prediction, which gives targets and metrics.
        features: the features of a few public examples (n ≥ 1, ...), on the same device.
        targets: the targets of these examples (n, ...).

    Raises:
        UnsafeModelError: gradients are to be clipped per example, but an example affects the
            gradient of another.
    """
    base = None if experiment.local.zeroth_order is None else local_base(module)
    if isinstance(base, RebuiltModel):
        # Padded batches of slopes are checked bit for bit by forward passes (`RowIsolation`).
        gradients = Slopes(module, loss, base.directions)
        shared = SharedCoefficients(gradients, experiment.local.given_steps)
    else:
        private = experiment.release_kind.draws_batches
        gradients = training_gradients(module, loss, features, targets, private=private)
        parameters = None if gradients is None else gradients.parameters
        shared = SharedModel(module, parameters=parameters)
    return FederationModel(module, shared, loss, gradients, task, features.device)


def still_parameters_of(
    model: FederationModel, features: Tensor, targets: Tensor, *, lr: float
) -> tuple[StillParameter, ...]:
    """Return the trainable parameters that two test steps on public examples do not change.

    Args:
        model: the initial model.
        features: the features of public examples (n ≥ 1, ...).
        targets: the targets of these examples (n, ...).
        lr: the largest learning rate.

    Raises:
        ModelError: no parameter changes, so that nothing would be learned.
    """
    if isinstance(model.gradients, Slopes):  # random directions change all parameters
        return parameters_without_effect(model.module, model.loss, features, targets)
    return still_parameters(model.module, model.loss, features, targets, lr=lr)


def release_parameters(experiment: Experiment, model: FederationModel) -> FlatParameters:
    """Return the names and shapes of the values in one release of a client.

    These are the trained parameters. For zeroth-order training they are a step's coefficients.
    """
    if experiment.release_kind.draws_batches and isinstance(model.gradients, Slopes):
        return model.gradients.parameters
    return model.shared.parameters


class ClientTensors:
    """The feature and target tensors of clients, built when a client trains.

    Two kinds of tensors are kept for later rounds: tensors on a GPU, and features computed from a
    dataset on disk. They are kept up to `cache_bytes`, for the clients that train first. Other
    tensors need no cache: they are a view of the data, or a quick copy on the CPU.

    Args:
        clients: every client's examples.
        device: the device of the tensors.
        cache_bytes: the largest total size of the tensors that are kept, in bytes.
    """

    def __init__(
        self, clients: ClientExamples, device: torch.device, *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self._clients = clients
        self._device = device
        self._is_kept = device.type != "cpu" or clients.transform is not None
        self._free_bytes = cache_bytes
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._digests: dict[int, bytes] = {}

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the features (n, ...) and the targets (n, ...) of a client."""
        if client in self._cache:
            return self._cache[client]
        examples = self._clients[client]
        tensors = torch.from_numpy(examples.features), torch.from_numpy(examples.targets)
        if not self._is_kept:
            return tensors
        features, targets = (tensor.to(self._device) for tensor in tensors)
        size = features.nbytes + targets.nbytes
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._cache[client] = features, targets
        return features, targets

    def digest(self, client: int) -> bytes:
        """Return the digest of a client's examples, computed once per process."""
        if client not in self._digests:
            self._digests[client] = digest_examples(self._clients[client])
        return self._digests[client]


def order_by_client(
    clients: ClientExamples, *, examples_per_round: int, small_bytes: int = _SMALL_DATA_BYTES
) -> ClientExamples:
    """Return the clients' examples, sorted in memory by client if that makes rounds faster.

    In sorted data each client's examples are one slice, so no round copies them. With 50 clients of
    300 examples with 784 values, and 4 batches of 32 a round, that saves a tenth of the processor
    time of whole rounds. With 5,000 examples each, it saves two thirds. Sorting needs the memory of
    the examples twice. So large data are sorted only if a round uses few of a client's examples.
    Data on disk are never sorted.

    Args:
        clients: every client's examples.
        examples_per_round: the number of examples in the batches of one client's round.
        small_bytes: the size in bytes up to which data are always sorted.
    """
    uses_few = sum(clients.sizes) > _MAX_GATHER_FACTOR * examples_per_round * len(clients)
    is_faster = clients.is_in_memory and (uses_few or clients.nbytes <= small_bytes)
    return clients.select(range(len(clients))) if is_faster else clients


PREFIX = "train_"


@dataclass(frozen=True)
class TrainMetrics:
    """Function that computes an experiment's declared training metrics on one client's examples.

    Attributes:
        names: the names of the declared metrics, such as `train_loss`.
        loss: the loss function, which returns one value per example.
        task: the task, which computes metrics from outputs.
        examples: function that returns the client's examples; called once for each measurement.
    """

    names: tuple[str, ...]
    loss: PerExampleLoss
    task: Task
    examples: Callable[[], Examples]

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        """Return each metric's mean over the client's examples, by name.

        The train and eval modes of the model's modules are unchanged.

        Guarantee: the values are the same to the bit on every engine.
        """
        gathered = self.examples()
        examples = Examples(_aligned_copy(gathered.features), _aligned_copy(gathered.targets))
        metrics = evaluate(model, self.loss, self.task, examples)
        return {name: metrics[name.removeprefix(PREFIX)] for name in self.names}


def _aligned_copy(values: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of an array with the memory alignment of tensors that torch allocates.

    The alignment decides which matrix product kernel runs, and so the last bits. Without a copy it
    differs between engines.
    """
    return torch.from_numpy(values).clone().numpy()


class DeviceError(InputError):
    """Error of a requested device that this machine does not have."""


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device that `runtime.device` names; `auto` is CUDA if available, else the CPU.

    Raises:
        DeviceError: the setting is `cuda` and the machine has no CUDA device.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError(
            "runtime.device: cuda, but this machine has no CUDA device; use auto or cpu"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def device_kind(device: torch.device) -> str:
    """Return a text for a device's hardware; devices with equal texts train to the same bits."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
