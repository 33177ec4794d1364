"""Federations: the data, model, plan, clients and server of an experiment, ready to run."""

import hashlib
import json
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord

import fedsim
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.algorithms.algorithm import Algorithm
from fedsim.algorithms.state import ServerState
from fedsim.clients.account import Accounts
from fedsim.clients.faults import FaultPlan
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.task import (
    ClientData,
    ClientScores,
    ClientTask,
    Evaluate,
    LocalTraining,
    RunTerms,
)
from fedsim.core.plugin_sources import PluginSources
from fedsim.data import Examples, FederatedData
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.federation.blocks import Blocks
from fedsim.federation.first_checks import algorithm_of
from fedsim.federation.plan import FederationPlan, Goal
from fedsim.federation.public_scores import Models, PublicScores
from fedsim.federation.trained_model import (
    ClientTensors,
    FederationModel,
    TrainMetrics,
    device_kind,
    model_arrays,
    release_parameters,
)
from fedsim.models.adapters import merge_adapters
from fedsim.models.local_base import LocalBase, whole_state
from fedsim.models.scores.metrics import MetricValue, choose_metrics
from fedsim.models.tasks import evaluate
from fedsim.protocol.arrays import to_numpy
from fedsim.server.app import scored_models
from fedsim.server.client_ledgers import ClientLedgers

if TYPE_CHECKING:
    from fedsim.clients.secure.channel import SecureChannel


@dataclass(frozen=True)
class Federation:
    """The data, model, plan, clients and server of an experiment, ready to run in this process.

    Attributes:
        experiment: the settings.
        base: the directory in which the experiment's relative paths start.
        sources: the recorded sources of the plug-ins.
        data: the clients' examples and the server's test set.
        model: the model with its loss, gradients, task and device.
        plan: the participation, steps, noise and weights of all clients.
        journal: the durable ledger; None where clients keep their ledgers in their state only.
        secure: the keys and encoding of secure aggregation; None where updates are sent in clear.
        goal: the clients' work: to train a model, or with `task: pate` to vote on labels.
    """

    experiment: ExperimentWithClients
    base: Path
    sources: PluginSources
    data: FederatedData
    model: FederationModel
    plan: FederationPlan
    journal: FileJournal | None = None
    secure: "SecureChannel | None" = None
    goal: Goal = field(default_factory=Goal)

    @cached_property
    def _tensors(self) -> ClientTensors:
        return ClientTensors(self.data.clients, self.model.device)

    @cached_property
    def conditions(self) -> str:
        """The digest of the settings, plug-in sources, versions and device of the run."""
        conditions = digest_conditions(self.experiment, self.sources.digest, self.model.device)
        return self.goal.digest(conditions)

    @cached_property
    def _faults(self) -> FaultPlan:
        return FaultPlan(self.experiment.seed, tuple(self.experiment.faults))

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.data.clients)

    @property
    def num_nodes(self) -> int:
        """The number of nodes: clients, plus helpers of secure aggregation."""
        return self.num_clients + (0 if self.secure is None else self.secure.settings.helpers)

    @property
    def sizes(self) -> dict[str, Any]:
        """Public sizes of data and model, by name; no number of private examples is among them."""
        parameters = list(self.model.module.parameters())
        return {
            "test_examples": len(self.data.test),
            "input_shape": list(self.data.raw_input_shape),
            "num_classes": self.data.num_classes,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trained_parameters": sum(
                parameter.numel() for parameter in parameters if parameter.requires_grad
            ),
        }

    def initial_arrays(self) -> ArrayRecord:
        """Return the initial global model; with `task: pate`, an empty record of answers."""
        return model_arrays(self.model.shared.model)

    def final_model(self, state: ServerState) -> ArrayRecord:
        """Return the model to save at the end of a run; with `task: pate`, the student model."""
        return self.goal.model_of(state.model)

    def saved_values(self, arrays: ArrayRecord) -> dict[str, np.ndarray]:
        """Return the arrays to save in `model.safetensors`, by parameter name.

        Args:
            arrays: the arrays of the server; with `task: pate`, the record of answers.
        """
        arrays = self.goal.model_of(arrays)
        if not self.goal.averages or not self.experiment.saves_derived_model:
            return to_numpy(arrays)
        self.model.module.load_state_dict(arrays.to_torch_state_dict())
        lora, model = self.experiment.model.lora, deepcopy(self.model.module)
        state = whole_state(model if lora and lora.save == "adapters" else merge_adapters(model))
        if lora is not None and lora.save == "adapters":
            LocalBase(model).to_wire(state)
        return {name: value.cpu().numpy() for name, value in state.items()}

    def client_task(self, client: int) -> ClientTask:
        """Return what a client needs to answer requests: data, settings, plan and model."""
        return ClientTask(
            client,
            self._terms,
            ClientData(
                self.data.clients.size(client),
                partial(self._tensors.of, client),
                partial(self._tensors.digest, client),
            ),
            self._training,
            None if self.plan.clients is None else self.plan.clients[client],
            self.accounts,
            weight=self.plan.weights.announced(client),
            secure=self.secure,
            scores=ClientScores(self._evaluate(client), self._train_metrics(client)),
            faults=self._faults,
        )

    @cached_property
    def accounts(self) -> Accounts:
        """The privacy accounts of the clients of this process."""
        return Accounts(self.journal)

    @cached_property
    def _terms(self) -> RunTerms:
        return RunTerms(self.experiment.seed, self.conditions, self.plan.digest)

    @cached_property
    def _training(self) -> LocalTraining:
        return LocalTraining(
            self.model.shared,
            self.model.loss,
            self.model.gradients,
            self.experiment.local,
            self.plan.steps.local_steps,
            self.blocks,
            rule=self.algorithm.client(),
            sent=self.algorithm.sent_arrays(),
            voter=self.goal.voter,
        )

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of clients that train together in one vectorized computation."""
        return Blocks(
            experiment=self.experiment,
            data=self.data,
            model=self.model.module,
            gradients=self.model.gradients if self.goal.averages else None,
            participation=self.plan.participation,
            plans=self.plan.clients,
            device=self.model.device,
        )

    def _train_metrics(self, client: int) -> TrainMetrics | None:
        """Return a client's declared metrics, or None under privacy, as they carry no noise."""
        if self.plan.clients is not None:
            return None
        declared = tuple(() if self.secure is None else self.secure.settings.metrics)
        declared = declared or self.algorithm.private_numbers()
        if not declared:
            return None
        examples = partial(self.data.clients.__getitem__, client)
        return TrainMetrics(declared, self.model.loss, self.model.task, examples)

    def _evaluate(self, client: int) -> Evaluate | None:
        """Return the function that evaluates a model on a client, or None without `holdout`.

        Examples that are held out for personal models are never used for it.
        """
        asked = self.experiment.client_evaluation is not None and self.data.held_out is not None
        return partial(self._held_out, client) if asked else None

    def _held_out(self, client: int, arrays: ArrayRecord) -> tuple[int, dict[str, float]]:
        """Return the number of a client's held-out examples, and a model's metrics on these.

        R² is left out: its baseline is the mean of the client's own targets, so an average over
        clients is no R².
        """
        held_out = self.data.held_out
        if held_out is None or held_out.size(client) == 0:
            return 0, {}
        examples = held_out[client]
        self.model.shared.load(arrays)
        self.model.shared.restart()
        metrics = evaluate(self.model.module, self.model.loss, self.model.task, examples)
        return len(examples), {name: value for name, value in metrics.items() if name != "r2"}

    def client_ledgers(self) -> ClientLedgers | None:
        """Return every client's ledger, read from disk in a resumed run; None without privacy."""
        privacy = self.experiment.privacy
        if privacy is None:
            return None
        if self.plan.clients is None or self.journal is None:
            return ClientLedgers(privacy.accounting, privacy.adjacency.name)
        plans = self.plan.clients
        ledgers = ClientLedgers(
            privacy.accounting,
            privacy.adjacency.name,
            recorded=lambda client: self.accounts.of(client, plans[client]).spend,
        )
        for client in self.journal.clients():
            ledgers.look_up(client)
        return ledgers

    @cached_property
    def public_scores(self) -> PublicScores:
        """The object that evaluates global models on the server's public test set.

        Raises:
            MetricError: a metric of `evaluation.metrics` cannot score the task.
            PluginError: a function of `evaluation.metrics` cannot be found or loaded.
        """
        names, data = self.experiment.metrics, self.data
        chosen = None if names is None else choose_metrics(names, self.model.task, base=self.base)
        parts = (self.model.module, self.model.loss, self.model.task, data.test, self.model.device)
        return PublicScores(*parts, chosen, data.class_names, data.test_groups, data.client_names)

    def scored_models(self, state: ServerState) -> Models:
        """Return the models to evaluate after a round: usually the global model.

        If the algorithm keeps a personal model for each client, these are all personal models.
        """
        models = scored_models(self.algorithm, state)
        return self.goal.model_of(models) if isinstance(models, ArrayRecord) else models

    def test_metrics(self, models: Models) -> dict[str, MetricValue]:
        """Return the metrics of models on the server's test set, by names that start with `test_`.

        Args:
            models: the global model, or all personal models, over which loss and accuracy are
                averaged.

        Raises:
            FederationError: a model, the loss or a metric fails.
        """
        scored, counts = models, {}
        if isinstance(models, ArrayRecord):
            scored, counts = self.goal.model_of(models), self.goal.counts(models)
        scores = self.public_scores.metrics(scored)
        return {f"test_{name}": value for name, value in scores.items()} | counts

    @cached_property
    def algorithm(self) -> Algorithm:
        """The federated algorithm, a stateless object for all rounds.

        Raises:
            AlgorithmError: there is no such algorithm, or it does not accept its settings.
        """
        made = self.goal.algorithm()
        return made or algorithm_of(self.experiment, self.model.module, self.base)

    @property
    def release_parameters(self) -> FlatParameters:
        """The names and shapes of the values in one release of a client.

        These are the trained parameters. For zeroth-order training they are a step's coefficients.
        """
        return release_parameters(self.experiment, self.model)


def goal_of(
    experiment: Experiment, queries: Examples | None, model: FederationModel, *, classes: int
) -> tuple[Goal, FederationModel]:
    """Return the goal of an experiment, and the model with what its rounds update.

    Args:
        experiment: the settings.
        queries: the public queries; None without `task: pate`.
        model: the initial model; with `task: pate`, teachers and student train it.
        classes: the number of classes.
    """
    if queries is None:
        return Goal(), model
    from fedsim.federation.voting import voting_of

    return voting_of(experiment, queries, model, classes=classes)


def digest_conditions(experiment: Experiment, sources: str, device: torch.device) -> str:
    """Return the digest of the conditions of a run in this process.

    The conditions are the same for all clients and rounds of a run. A client repeats its answer in
    a round only under the same conditions (`clients/account.py`).

    Args:
        experiment: the settings; the paths of data files are left out, as each client's examples
            have their own digest.
        sources: the digest of the plug-ins' sources.
        device: the device that trains.
    """
    settings = experiment.model_dump(mode="json", include={"data", "model", "local", "privacy"})
    if isinstance(settings["data"]["dataset"], dict):
        for place in ("path", "test"):
            del settings["data"]["dataset"][place]
    if experiment.data.folder is not None:
        del settings["data"]["args"]["path"]
    versions = (fedsim.__version__, torch.__version__, np.__version__)
    content = [settings, sources, *versions, device_kind(device)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
