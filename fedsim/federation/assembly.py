"""An experiment assembled: data, model and plans become clients and a server."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.app import ClientTask
from fedsim.clients.batch_app import ManyClientsApp
from fedsim.clients.budget.client_privacy import ClientTerms, terms_of_clients
from fedsim.clients.budget.plan import PrivacyPlan, plan_privacy
from fedsim.clients.dp_sgd.model_checks.isolation import check_isolation
from fedsim.clients.dp_sgd.model_checks.safety import check_private_model
from fedsim.clients.dp_sgd.per_example.backend import gradients_for
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleGradients, PerExampleLoss
from fedsim.clients.faults.injection import FaultPlan
from fedsim.clients.secure.channel import SecureChannel
from fedsim.clients.training.cohort_size import Workload, cohort_size
from fedsim.clients.training.cohorts import cohorts_agree
from fedsim.clients.training.shared_model import Workbench
from fedsim.core.device import choose_device
from fedsim.data import FederatedData, load_federated_data
from fedsim.experiment import Experiment, LoadedExperiment
from fedsim.federation.client_tables import read_client_tables
from fedsim.federation.client_tensors import ClientTensors, arranged
from fedsim.federation.nodes import with_helpers
from fedsim.federation.recorded_spend import RecordedSpend
from fedsim.federation.replica import PROBED, TRIED, first_public, initial_model, tensors_of
from fedsim.federation.secure_setup import secure_channel
from fedsim.federation.shards import FederationClients
from fedsim.federation.train_metrics import TrainMetrics, check_train_metrics
from fedsim.models.losses import resolve_loss
from fedsim.models.metrics import Task, evaluate, task_for
from fedsim.models.preflight import preflight
from fedsim.server.app import RoundResult, SecureAggregation, Start, make_server_app
from fedsim.server.client_ledgers import PrivacyBook
from fedsim.server.evaluation import ClientEvaluation
from fedsim.server.participation import Participation
from fedsim.server.secure.opened_sums import NO_OPENINGS, Openings


@dataclass(frozen=True)
class Federation:
    """Everything that an experiment file describes, ready to run in this process.

    `model` is the initial model; it is scratch space once the federation runs. `plans` and `terms`
    hold the privacy plan and the privacy settings of each client, or are None without privacy.
    """

    experiment: Experiment
    base: Path
    data: FederatedData
    model: nn.Module
    bench: Workbench
    loss: PerExampleLoss
    gradients: PerExampleGradients | None
    task: Task
    participation: Participation
    terms: tuple[ClientTerms, ...] | None
    plans: tuple[PrivacyPlan, ...] | None
    device: torch.device
    journal: FileJournal | None
    secure: SecureChannel | None = None

    @cached_property
    def _tensors(self) -> ClientTensors:
        return ClientTensors(self.data.clients, self.device)

    @cached_property
    def _faults(self) -> FaultPlan:
        return FaultPlan(self.experiment.seed, tuple(self.experiment.faults))

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.data.clients)

    @property
    def num_nodes(self) -> int:
        """Number of nodes: the clients, and the helpers of secure aggregation."""
        return self.num_clients + (0 if self.secure is None else self.secure.settings.helpers)

    def initial_arrays(self) -> ArrayRecord:
        """Return the initial global model as a record."""
        return ArrayRecord({name: value.cpu() for name, value in self.model.state_dict().items()})

    def client_task(self, client: int) -> ClientTask:
        """Return what `client` needs to train."""
        return ClientTask(
            client=client,
            seed=self.experiment.seed,
            size=self.data.clients.size(client),
            data=partial(self._tensors.of, client),
            bench=self.bench,
            loss=self.loss,
            gradients=self.gradients,
            local=self.experiment.local,
            privacy=None if self.plans is None else self.plans[client],
            journal=self.journal,
            evaluate=None if self.data.held_out is None else partial(self._held_out, client),
            faults=self._faults,
            secure=self.secure,
            measure=self._train_metrics(client),
        )

    def _train_metrics(self, client: int) -> TrainMetrics | None:
        """Return the metrics that a client sends in the sum; none under privacy, without noise."""
        declared = {} if self.secure is None else self.secure.settings.metrics
        if not declared or self.plans is not None:
            return None
        examples = partial(self.data.clients.__getitem__, client)
        return TrainMetrics(tuple(declared), self.loss, self.task, examples)

    def _held_out(self, client: int, arrays: ArrayRecord) -> tuple[int, dict[str, float]]:
        """Return how many examples a client holds out, and the metrics of a model on them.

        R² is left out: it compares with the mean of the examples it is computed on, so that the
        average of clients' values is nobody's R².
        """
        held_out = self.data.held_out
        if held_out is None or held_out.size(client) == 0:
            return 0, {}
        examples = held_out[client]
        self.bench.load(arrays)
        self.bench.restart()
        found = evaluate(self.model, self.loss, self.task, examples)
        return len(examples), {name: value for name, value in found.items() if name != "r2"}

    def privacy_book(self) -> PrivacyBook | None:
        """Return the server's book, with what a resumed run has spent; None without privacy."""
        privacy = self.experiment.privacy
        if privacy is None:
            return None
        if self.plans is None or self.journal is None:
            return PrivacyBook(privacy.accountant, privacy.adjacency)
        spend = RecordedSpend(self.plans, self.journal)
        book = PrivacyBook(privacy.accountant, privacy.adjacency, recorded=spend.statement)
        for client in spend.clients():
            book.look_up(client)
        return book

    def test_metrics(self, arrays: ArrayRecord) -> dict[str, float]:
        """Return the metrics of a global model on the server's test set, as `test_...`."""
        self.model.load_state_dict(arrays.to_torch_state_dict())
        found = evaluate(self.model, self.loss, self.task, self.data.test, device=self.device)
        return {f"test_{name}": value for name, value in found.items()}

    def server_app(
        self,
        *,
        start: Start,
        on_round: Callable[[RoundResult], None],
        on_stop: Callable[[str], None],
        book: PrivacyBook | None,
        patience: float = 60.0,
        openings: Openings = NO_OPENINGS,
    ) -> ServerApp:
        """Return the server of this federation, which waits `patience` seconds for its nodes."""
        privacy = self.experiment.privacy
        return make_server_app(
            settings=self.experiment.federation,
            participation=self.participation,
            start=start,
            evaluate=self.test_metrics,
            on_round=on_round,
            book=book,
            steps=self.experiment.local.steps,
            stop_when_withdrawn=privacy is not None and privacy.on_exhausted == "stop",
            on_stop=on_stop,
            patience=patience,
            secure=None
            if self.secure is None
            else SecureAggregation(self.secure.settings, self.secure.codec, openings),
            evaluation=self._evaluation(),
        )

    def _evaluation(self) -> ClientEvaluation | None:
        experiment = self.experiment
        if experiment.evaluation is None:
            return None
        return ClientEvaluation(
            experiment.evaluation,
            experiment.seed,
            experiment.federation.rounds,
            experiment.federation.deadline,
        )

    def _cohort_size(self) -> int:
        """Return how many clients train together in this process.

        Whoever limits the examples in memory wants no more of them from other clients; a lot in
        parts is also summed in another order than a whole one.
        """
        if self.experiment.local.max_physical_batch is not None:
            return 1
        features, targets = tensors_of(first_public(self.data, PROBED), self.device)
        lots = [plan.step.expected_lot for plan in self.plans or ()]
        work = Workload(
            values=self.bench.parameters.size,
            lot=max(lots, default=self.experiment.local.batch_size),
            inputs=features[0].numel(),
            private=self.plans is not None,
        )
        size = cohort_size(self.model, work, self.experiment.runtime.cohort)
        agree = size > 1 and cohorts_agree(
            self.bench,
            self.loss,
            self.gradients,
            self.experiment.local,
            features,
            targets,
            None if self.plans is None else self.plans[0].step,
        )
        return size if agree else 1

    def client_app(self, *, in_process: bool, ledger: Path | None) -> ClientApp:
        """Return the clients: sharing this object, or rebuilt from the experiment elsewhere."""
        if in_process:
            clients = ManyClientsApp(self.client_task, cohort_size=self._cohort_size())
            return with_helpers(clients, self.experiment, self.base)
        return FederationClients(
            self, TaskSource(self.experiment.model_dump_json(), self.base, ledger)
        )


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


def assemble(
    loaded: LoadedExperiment, *, ledger: Path | None, trains_here: bool = False
) -> Federation:
    """Build the federation of an experiment and check that it can train.

    Args:
        loaded: the experiment and the directory that its paths are relative to.
        ledger: file of the durable ledger; None keeps accounts in the clients' state only.
        trains_here: all clients will train in this process, so their examples may be put in order.

    Raises:
        ValueError: data, model, loss or privacy do not fit; the message names what and the fix
            (DataError, ModelError, PluginError and UnsafeModelError are ValueErrors).
    """
    experiment = loaded.experiment
    data = load_federated_data(
        experiment.data,
        seed=experiment.seed,
        base=loaded.base,
        holdout=None if experiment.evaluation is None else experiment.evaluation.holdout,
    )
    if trains_here:
        used = experiment.local.steps * experiment.local.batch_size
        data = replace(data, clients=arranged(data.clients, used=used))
    loss = resolve_loss(experiment.model.loss, base=loaded.base)
    task = task_for(experiment.model.loss, data.test.targets, num_classes=data.num_classes)
    device = choose_device(experiment.runtime.device)
    model = initial_model(experiment, data, task, base=loaded.base)
    preflight(model, loss, task, data.test)
    participation = Participation.of(
        experiment.federation, num_clients=len(data.clients), seed=experiment.seed
    )
    terms = _terms(loaded, len(data.clients))
    model = model.to(device)
    gradients, few = None, first_public(data, TRIED)
    if experiment.privacy is not None:
        features, targets = tensors_of(few, device)
        check_private_model(model, features)
        check_isolation(model, loss, features, targets)
        gradients = gradients_for(model, loss, features, targets)
    secure = secure_channel(experiment, model.state_dict(), data.clients.sizes)
    if secure is not None:
        check_train_metrics(secure.settings.metrics, model, loss, task, few)
    return Federation(
        experiment=experiment,
        base=loaded.base,
        data=data,
        model=model,
        bench=Workbench(model, parameters=None if gradients is None else gradients.parameters),
        loss=loss,
        gradients=gradients,
        task=task,
        participation=participation,
        terms=terms,
        plans=None if terms is None else _plans(terms, experiment, data, participation, gradients),
        device=device,
        journal=None if ledger is None else FileJournal(ledger),
        secure=secure,
    )


def _terms(loaded: LoadedExperiment, num_clients: int) -> tuple[ClientTerms, ...] | None:
    privacy = loaded.experiment.privacy
    if privacy is None:
        return None
    return terms_of_clients(
        privacy,
        num_clients=num_clients,
        seed=loaded.experiment.seed,
        tables=read_client_tables(privacy, loaded.base),
    )


def _plans(
    terms: tuple[ClientTerms, ...],
    experiment: Experiment,
    data: FederatedData,
    participation: Participation,
    gradients: PerExampleGradients | None,
) -> tuple[PrivacyPlan, ...]:
    return tuple(
        plan_privacy(
            own.privacy,
            experiment.local,
            examples=examples,
            planned_rounds=planned_rounds,
            parameters=None if gradients is None else gradients.parameters,
        )
        for own, examples, planned_rounds in zip(
            terms, data.clients.sizes, participation.planned_rounds(), strict=True
        )
    )
