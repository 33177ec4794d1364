"""A federation divided among processes: data and plans travel, model and loss are made there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import Journal
from fedsim.clients.app import ClientTask, make_client_app
from fedsim.clients.batch_app import BatchClientApp
from fedsim.clients.dp_sgd.per_example.backend import gradients_for
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.device import choose_device
from fedsim.data import FederatedData
from fedsim.experiment import Experiment, LoadedExperiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.nodes import num_helpers, with_helpers
from fedsim.federation.replica import PROBED, TRIED, first_public, initial_model, tensors_of
from fedsim.models.losses import resolve_loss
from fedsim.simulation.shardable_app import Shard

_MADE_THERE = {"model", "bench", "loss", "gradients", "device", "journal", "data"}


def client_app(federation: Federation, *, in_process: bool, ledger: Path | None) -> ClientApp:
    """Return the clients: sharing this object, or rebuilt from the experiment elsewhere."""
    if in_process:
        clients = BatchClientApp(federation.client_task, cohort_size=federation.cohort_size())
        return with_helpers(clients, federation.experiment, federation.base)
    source = TaskSource(federation.experiment.model_dump_json(), federation.base, ledger)
    return FederationClients(federation, source)


@dataclass(frozen=True)
class TaskSource:
    """Gives client tasks in another process, from the experiment's JSON alone."""

    experiment: str
    base: Path
    ledger: Path | None

    @property
    def settings(self) -> Experiment:
        """The experiment."""
        return Experiment.model_validate_json(self.experiment)

    def __call__(self, client: int) -> ClientTask:
        """Return the task of `client`; the first call in a process assembles the federation."""
        return _assembled(self).client_task(client)


@lru_cache(maxsize=1)
def _assembled(source: TaskSource) -> Federation:
    experiment = source.settings
    loaded = LoadedExperiment(experiment=experiment, path=None, base=source.base)
    return assemble(loaded, ledger=source.ledger)


def clients_elsewhere(source: TaskSource) -> ClientApp:
    """Return the clients of a federation that is assembled, when first asked, in this process."""
    return with_helpers(make_client_app(source), source.settings, source.base)


class FederationClients(ClientApp):
    """The clients of a federation as a ClientApp for other processes.

    Pickled, it is the whole federation, rebuilt from its experiment where it arrives (as Flower's
    runtime needs it). Divided, each process gets the data of its own clients.
    """

    def __init__(self, federation: Federation, source: TaskSource) -> None:
        super().__init__()
        self._federation = federation
        self._source = source

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        return clients_elsewhere(self._source)(message, context)

    def __reduce__(self) -> tuple[Any, ...]:
        return clients_elsewhere, (self._source,)

    @property
    def ledger(self) -> Path | None:
        """File of the durable ledger."""
        return None if self._federation.plans is None else self._source.ledger

    def work(self) -> list[float]:
        """Return the examples that each node is expected to compute gradients of in the run."""
        federation = self._federation
        local = federation.experiment.local
        rounds = federation.participation.planned_rounds()
        clients = [
            float(planned * local.steps * min(local.batch_size, size))
            for planned, size in zip(rounds, federation.data.clients.sizes, strict=True)
        ]
        return clients + [0.0] * num_helpers(federation.experiment)  # nothing beside training

    def shard(self, clients: Sequence[int]) -> Shard:
        """Return what another process needs to be the given clients and helpers."""
        federation = self._federation
        rest = {
            field.name: getattr(federation, field.name)
            for field in fields(federation)
            if field.name not in _MADE_THERE
        }
        data = federation.data
        here = [client for client in clients if client < len(data.clients)]  # the rest help
        share = replace(
            data,
            clients=data.clients.only(here),
            held_out=None if data.held_out is None else data.held_out.only(here),
            test=first_public(data, PROBED),
        )
        return _FederationShard(type(federation), rest, share)


@dataclass(frozen=True)
class _FederationShard:
    kind: type[Federation]
    rest: Mapping[str, Any]
    data: FederatedData

    def __call__(self, journal: Journal | None) -> ClientApp:
        """Assemble the part of the federation that these clients need."""
        experiment, base = self.rest["experiment"], self.rest["base"]
        device = choose_device(experiment.runtime.device)
        loss = resolve_loss(experiment.model.loss, base=base)
        model = initial_model(experiment, self.data, self.rest["task"], base=base).to(device)
        gradients = None
        if experiment.privacy is not None:
            few = first_public(self.data, TRIED)
            gradients = gradients_for(model, loss, *tensors_of(few, device))
        # Memory of its own: what Ray delivers is shared and cannot be written to.
        federation = self.kind(
            **self.rest,
            data=self.data.copied(),
            model=model,
            bench=SharedModel(
                model, parameters=None if gradients is None else gradients.parameters
            ),
            loss=loss,
            gradients=gradients,
            device=device,
            journal=cast("Any", journal),
        )
        return client_app(federation, in_process=True, ledger=None)
