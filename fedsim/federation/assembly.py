"""Assembly of a federation from an experiment: load the data, build the model, plan the privacy."""

from dataclasses import replace
from pathlib import Path

import torch

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.app import one_thread
from fedsim.clients.gradients.example_randomness import check_views
from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd.draft import whole_round_steps
from fedsim.clients.model_checks.safety import check_private_model
from fedsim.core.commands import Phases
from fedsim.core.plugin_errors import plugin_calls
from fedsim.data import DataError, FederatedData, load_federated_data
from fedsim.experiment import Experiment, LoadedExperiment
from fedsim.experiment.load import with_clients
from fedsim.federation.conditions import choose_device, plugin_sources, refuse_edited_plugins
from fedsim.federation.federation import Federation
from fedsim.federation.first_checks import checked_algorithm
from fedsim.federation.plan import plan_of, schedule_of
from fedsim.federation.plan_checks import check_batch_size
from fedsim.federation.trained_model import (
    NUM_CHECK_EXAMPLES,
    NUM_PROBE_EXAMPLES,
    FederationModel,
    federation_model,
    initial_model,
    model_arrays,
    order_by_client,
    public_examples,
    still_parameters_of,
    to_tensors,
)
from fedsim.federation.voting import goal_of, split_queries
from fedsim.models.build import preflight
from fedsim.models.catalog import ModelError
from fedsim.models.features.transforms import FeaturePipeline
from fedsim.models.local_base import local_base
from fedsim.models.losses import resolve_loss
from fedsim.models.tasks import Task, task_for
from fedsim.protocol.arrays import upload_base


def assemble(
    loaded: LoadedExperiment,
    *,
    ledger: Path | None,
    in_process: bool = False,
    phases: Phases | None = None,
) -> Federation:
    """Build the federation of an experiment, and check that its model can train.

    Args:
        loaded: the experiment and the directory that its paths are relative to.
        ledger: the file of the durable ledger; None where clients keep their ledgers in their
            state only.
        in_process: whether all clients train in this process; their examples may then be reordered.
        phases: display that is told when each phase of the set-up (such as loading data) starts;
            the caller ends the last phase.

    Raises:
        ValueError: data, model, loss or privacy do not fit; the message names the setting and the
            fix (DataError, ModelError, PluginError and UnsafeModelError are ValueErrors).
    """
    # A plug-in's result may break fedsim's own lines, so every error counts as the plug-in's.
    mixed = not loaded.experiment.plugins
    with plugin_calls("a plug-in failed before the first round", mixed=mixed):
        return _assemble(loaded, ledger, phases or Phases(), in_process=in_process)


def _assemble(
    loaded: LoadedExperiment, ledger: Path | None, phases: Phases, *, in_process: bool
) -> Federation:
    settings, base = loaded.experiment, loaded.base
    phases.begin("loading the data")
    sources = plugin_sources(settings, base)
    data = _load(settings, base)
    experiment = with_clients(loaded, len(data.clients))
    data, queries = split_queries(experiment, data)
    check_batch_size(experiment, data.clients.sizes)
    if experiment.privacy is not None and len(data.test) < 2:
        raise DataError(
            "data.test_fraction leaves 1 public test example, and a private model is checked on at "
            "least 2; raise test_fraction, or bring a test set of at least 2 examples"
        )
    if in_process:
        data = _by_client(data, experiment.local)
    loss = resolve_loss(experiment.model.loss, base=base)
    task = task_for(experiment.model.loss, data.test.targets, num_classes=data.num_classes)
    device = choose_device(experiment.runtime.device)
    check_views(experiment.local.views or (), data.input_shape)
    client_privacy, steps = schedule_of(experiment, base, data.clients.sizes)
    phases.begin("checking the model")
    model = _checked_model(experiment, base, data, loss, task, device)
    goal, model = goal_of(experiment, queries, model, classes=data.num_classes or 0)
    algorithm = checked_algorithm(experiment, model.module, base)
    if client_privacy is not None:
        phases.begin("calibrating noise")
    plan = plan_of(experiment, client_privacy, data, steps, model, algorithm)
    secure = None
    if (settings := experiment.secure_aggregation) is not None:
        from fedsim.federation.secure_setup import check_train_metrics, secure_channel

        upload = upload_base(model_arrays(model.shared.model))
        secure = secure_channel(experiment, settings, upload, plan, base=base)
        public = public_examples(data, NUM_CHECK_EXAMPLES)
        check_train_metrics(settings.metrics, model.module, loss, task, public)
    federation = Federation(
        experiment,
        base,
        sources,
        data,
        model,
        plan,
        journal=None if ledger is None else FileJournal(ledger),
        secure=secure,
        goal=goal,
    )
    federation.public_scores.check()
    refuse_edited_plugins(sources, experiment, base)
    return federation


def _load(settings: Experiment, base: Path) -> FederatedData:
    return load_federated_data(
        settings.data,
        seed=settings.seed,
        base=base,
        holdout=settings.holdout,
        group=settings.test_group,
        transform=FeaturePipeline(settings.model.features) if settings.model.features else None,
    )


def _by_client(data: FederatedData, local: LocalSettings) -> FederatedData:
    """Return the data with the examples of each client side by side in memory."""
    largest = max(data.clients.sizes)
    per_round = whole_round_steps(None, local, largest) * local.expected_batch(largest)
    return replace(data, clients=order_by_client(data.clients, examples_per_round=per_round))


def _checked_model(
    experiment: Experiment,
    base: Path,
    data: FederatedData,
    loss: PerExampleLoss,
    task: Task,
    device: torch.device,
) -> FederationModel:
    """Return the initial model, checked to be trainable.

    The checks run on one thread, as training does: their batches are so small that threads cost
    more time than they save, up to 30 times as much where processors are busy.
    """
    with one_thread():
        module = initial_model(experiment, data, task, base=base)
        preflight(module, loss, task, data.test)
        module = module.to(device)
        features, targets = to_tensors(public_examples(data, NUM_CHECK_EXAMPLES), device)
        if experiment.release_kind.draws_batches or local_base(module) is not None:
            check_private_model(module, features)
        if experiment.personalization is not None:
            from fedsim.personalization.personalize import check_personalization

            check_personalization(experiment.personalization, module, loss, features, targets)
        model = federation_model(experiment, module, loss, task, features, targets)
        public = to_tensors(public_examples(data, NUM_PROBE_EXAMPLES), device)
        lr = max(map(experiment.local.learning_rate, range(1, experiment.federation.rounds + 1)))
        with plugin_calls("the model failed in training", raises=ModelError):
            return replace(model, still=still_parameters_of(model, *public, lr=lr))


def with_plans(federation: Federation, loaded: LoadedExperiment) -> Federation:
    """Return a copy of a federation whose privacy plans follow from other settings.

    Use only the plans of the copy. Data, model and secure aggregation are those of the original.

    Args:
        federation: an assembled federation.
        loaded: the federation's experiment with another trust model, privacy unit or budget.

    Raises:
        ValueError: no noise meets the settings; the message names the setting and the fix.
    """
    data = federation.data
    experiment = with_clients(loaded, len(data.clients))
    client_privacy, steps = schedule_of(experiment, loaded.base, data.clients.sizes)
    if client_privacy is None:
        raise ValueError("there is nothing to plan without privacy")
    model = federation.model
    algorithm = checked_algorithm(experiment, model.module, loaded.base)
    plan = plan_of(experiment, client_privacy, data, steps, model, algorithm)
    return replace(federation, experiment=experiment, plan=plan)
