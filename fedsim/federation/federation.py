"""A federation: everything that an experiment describes, ready to run in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from torch import nn

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.app import ClientTask
from fedsim.clients.budget.client_privacy import ClientPrivacy
from fedsim.clients.budget.plan import PrivacyPlan
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleGradients, PerExampleLoss
from fedsim.clients.faults.injection import FaultPlan
from fedsim.clients.secure.channel import SecureChannel
from fedsim.clients.training.cohort_size import Workload, cohort_size
from fedsim.clients.training.cohorts import cohorts_agree
from fedsim.clients.training.shared_model import SharedModel
from fedsim.data import FederatedData
from fedsim.experiment import Experiment
from fedsim.federation.client_tensors import ClientTensors
from fedsim.federation.recorded_spend import RecordedSpend
from fedsim.federation.replica import PROBED, first_public, tensors_of
from fedsim.federation.train_metrics import TrainMetrics
from fedsim.models.metrics import Task, evaluate
from fedsim.server.app import RoundResult, SecureAggregation, Start, make_server_app
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.evaluation import ClientEvaluation
from fedsim.server.participation import Participation
from fedsim.server.secure.opened_sums import NO_OPENED_SUMS, OpenedSums


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
    bench: SharedModel
    loss: PerExampleLoss
    gradients: PerExampleGradients | None
    task: Task
    participation: Participation
    terms: tuple[ClientPrivacy, ...] | None
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

    def privacy_book(self) -> ClientLedgers | None:
        """Return the server's book, with what a resumed run has spent; None without privacy."""
        privacy = self.experiment.privacy
        if privacy is None:
            return None
        if self.plans is None or self.journal is None:
            return ClientLedgers(privacy.accountant, privacy.adjacency)
        spend = RecordedSpend(self.plans, self.journal)
        book = ClientLedgers(privacy.accountant, privacy.adjacency, recorded=spend.statement)
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
        book: ClientLedgers | None,
        patience: float = 60.0,
        openings: OpenedSums = NO_OPENED_SUMS,
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

    def cohort_size(self) -> int:
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
