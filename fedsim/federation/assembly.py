"""Assembly of a federation from an experiment: data, model, loss and privacy plans."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.algorithms.algorithm import Algorithm
from fedsim.clients.app import one_thread
from fedsim.clients.augmentation import check_views
from fedsim.clients.gradients.interface import PerExampleLoss
from fedsim.clients.mechanisms.client_privacy import ClientPrivacy, resolve_client_privacy
from fedsim.clients.mechanisms.dp_sgd.draft import whole_round_steps
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.model_checks.safety import check_private_model
from fedsim.core.commands import Phases
from fedsim.core.plugin_errors import plugin_calls
from fedsim.data import DataError, FederatedData, load_federated_data
from fedsim.experiment import Experiment, LoadedExperiment
from fedsim.experiment.load import with_num_clients
from fedsim.federation.aggregate_noise import share_noise
from fedsim.federation.algorithm import checked_algorithm
from fedsim.federation.client_plans import (
    client_plans,
    client_weights,
    plan_digest,
    read_client_tables,
)
from fedsim.federation.client_tensors import order_by_client
from fedsim.federation.conditions import choose_device, plugin_sources, refuse_edited_plugins
from fedsim.federation.federation import Federation
from fedsim.federation.movement import StillParameter
from fedsim.federation.plan_checks import check_batch_size
from fedsim.federation.release_problem import problem_of
from fedsim.federation.schedule import StepSchedule, participation_of
from fedsim.federation.trained_model import (
    NUM_CHECK_EXAMPLES,
    NUM_PROBE_EXAMPLES,
    TrainedParts,
    initial_model,
    model_arrays,
    public_examples,
    release_parameters,
    to_tensors,
    trained_parts,
)
from fedsim.federation.voting import GOALS
from fedsim.models.errors import ModelError
from fedsim.models.features.pipeline import FeaturePipeline
from fedsim.models.local_base import local_base
from fedsim.models.losses import resolve_loss
from fedsim.models.metrics import Task, task_for
from fedsim.models.preflight import preflight
from fedsim.protocol.arrays import upload_base
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.participation.participation import Participation


def assemble(
    loaded: LoadedExperiment,
    *,
    ledger: Path | None,
    in_process: bool = False,
    phases: Phases | None = None,
) -> Federation:
    """Return the federation of an experiment, checked to be able to train.

    Args:
        loaded: the experiment and the directory that its paths are relative to.
        ledger: file of the durable ledger; None: accounts live in the clients' state only.
        in_process: whether all clients train in this process; their examples may then be reordered.
        phases: the phases of the caller; the last phase of the assembly stays open.

    Raises:
        ValueError: data, model, loss or privacy do not fit; the message names the setting and the
            fix (DataError, ModelError, PluginError and UnsafeModelError are ValueErrors).
    """
    # A result of a plug-in may break fedsim's own lines, so every error counts as the plug-in's.
    mixed = not loaded.experiment.plugins
    with plugin_calls("a plug-in failed before the first round", mixed=mixed):
        return _assemble(loaded, ledger, phases or Phases(), in_process=in_process)


def _assemble(
    loaded: LoadedExperiment, ledger: Path | None, phases: Phases, *, in_process: bool
) -> Federation:
    experiment = loaded.experiment
    phases.begin("loading the data")
    sources = plugin_sources(experiment, loaded.base)
    data = load_federated_data(
        experiment.data,
        seed=experiment.seed,
        base=loaded.base,
        holdout=experiment.holdout,
        transform=FeaturePipeline(experiment.model.features) if experiment.model.features else None,
    )
    loaded = with_num_clients(loaded, len(data.clients))
    experiment = loaded.experiment
    task_goal = GOALS[experiment.task]
    data, queries = task_goal.split(experiment, data)
    check_batch_size(experiment, data.clients.sizes)
    if experiment.privacy is not None and len(data.test) < 2:
        raise DataError(
            "data.test_fraction leaves 1 public test example, and a private model is checked on at "
            "least 2; raise test_fraction, or bring a test set of at least 2 examples"
        )
    if in_process:
        largest = max(data.clients.sizes)
        steps = whole_round_steps(None, experiment.local, largest)
        per_round = steps * experiment.local.lot(largest)
        data = replace(data, clients=order_by_client(data.clients, examples_per_round=per_round))
    loss = resolve_loss(experiment.model.loss, base=loaded.base)
    task = task_for(experiment.model.loss, data.test.targets, num_classes=data.num_classes)
    device = choose_device(experiment.runtime.device)
    check_views(experiment.local.views or (), data.input_shape)
    participation = participation_of(experiment, len(data.clients))
    client_privacy = _client_privacy(loaded, len(data.clients))
    steps = StepSchedule.of(experiment, participation, client_privacy, data.clients.sizes)
    phases.begin("checking the model")
    model, parts = _checked_model(loaded, data, loss, task, device)
    still = _still_parameters(experiment, model, loss, data, parts, device)
    classes = data.num_classes or 0
    goal, shared = task_goal.of(experiment, queries, parts, loss, classes=classes, device=device)
    parts = replace(parts, shared_model=shared)
    algorithm = checked_algorithm(experiment, model, len(data.clients), loaded.base)
    if client_privacy is not None:
        phases.begin("calibrating noise")
    plans, weights, sums = _planned(experiment, client_privacy, data, steps, parts, algorithm)
    digest = plan_digest(experiment, plans, weights, sums)
    secure = None
    if (settings := experiment.secure_aggregation) is not None:
        from fedsim.federation.secure_setup import check_train_metrics, secure_channel

        upload = upload_base(model_arrays(parts.shared_model.model))
        secure = secure_channel(
            experiment, settings, upload, weights, sums, base=loaded.base, plan=digest
        )
        public = public_examples(data, NUM_CHECK_EXAMPLES)
        check_train_metrics(settings.metrics, model, loss, task, public)
    federation = Federation(
        experiment=experiment,
        base=loaded.base,
        data=data,
        model=model,
        shared_model=parts.shared_model,
        loss=loss,
        gradients=parts.gradients,
        task=task,
        participation=participation,
        client_privacy=client_privacy,
        plans=plans,
        device=device,
        journal=None if ledger is None else FileJournal(ledger),
        weights=weights,
        sources=sources,
        steps=steps,
        secure=secure,
        sums=sums,
        plan_digest=digest,
        still=still,
        goal=goal,
    )
    federation.public_scores.check()
    refuse_edited_plugins(sources, experiment, loaded.base)
    return federation


def _checked_model(
    loaded: LoadedExperiment,
    data: FederatedData,
    loss: PerExampleLoss,
    task: Task,
    device: torch.device,
) -> tuple[nn.Module, TrainedParts]:
    """Return the initial model and what clients train with; a model that cannot train is refused.

    The checks run on one thread, as training does: their lots are so small that threads would cost
    more than they gain, up to 30 times as much where processors are busy.
    """
    experiment = loaded.experiment
    with one_thread():
        model = initial_model(experiment, data, task, base=loaded.base)
        preflight(model, loss, task, data.test)
        model = model.to(device)
        features, targets = to_tensors(public_examples(data, NUM_CHECK_EXAMPLES), device)
        if experiment.release_kind.draws_lots or local_base(model) is not None:
            check_private_model(model, features)
        if experiment.personalization is not None:
            from fedsim.personalization.personalize import check_personalization

            check_personalization(experiment.personalization, model, loss, features, targets)
        parts = trained_parts(experiment, model, loss, features, targets)
    return model, parts


def _still_parameters(
    experiment: Experiment,
    model: nn.Module,
    loss: PerExampleLoss,
    data: FederatedData,
    parts: TrainedParts,
    device: torch.device,
) -> tuple[StillParameter, ...]:
    """Return the trained parameters that training does not move, on public examples."""
    public = to_tensors(public_examples(data, NUM_PROBE_EXAMPLES), device)
    rounds = range(1, experiment.federation.rounds + 1)
    lr = max(map(experiment.local.learning_rate, rounds))
    with one_thread(), plugin_calls("the model failed in training", raises=ModelError):
        return parts.still_parameters(model, loss, *public, lr=lr)


def _planned(
    experiment: Experiment,
    client_privacy: tuple[ClientPrivacy, ...] | None,
    data: FederatedData,
    steps: StepSchedule,
    parts: TrainedParts,
    algorithm: Algorithm,
) -> tuple[tuple[PrivacyPlan, ...] | None, ClientWeights, SumPlan | None]:
    """Return the plans and weights of all clients, and the plan of noisy sums where there are any.

    Weights follow from the plans of clients that add all of their noise alone, and shares of the
    noise from both.
    """
    plans = None
    if client_privacy is not None:
        parameters = release_parameters(experiment, parts.gradients, parts.shared_model)
        problem = problem_of(experiment, parts.shared_model.model, data, algorithm)
        sizes = data.clients.sizes
        plans = client_plans(experiment, client_privacy, sizes, steps, parameters, problem)
    weights = client_weights(
        experiment, data.clients.sizes, plans, takes_weights=algorithm.takes_weights
    )
    if client_privacy is None or plans is None or not _has_noisy_sums(experiment):
        return plans, weights, None
    plans, sums = share_noise(
        experiment, client_privacy, plans, weights, parts.shared_model.trained_shapes
    )
    return plans, weights, _with_public_divisor(sums, steps.participation, weights)


def _with_public_divisor(
    sums: SumPlan, participation: Participation, weights: ClientWeights
) -> SumPlan:
    """Return the plan of sums that are divided by a public number where participation is secret."""
    if not participation.is_secret:
        return sums
    return replace(sums, divisor=participation.rate * sum(weights.values))


def _has_noisy_sums(experiment: Experiment) -> bool:
    return experiment.privacy is not None and experiment.privacy.trust.name != "local"


def _client_privacy(loaded: LoadedExperiment, num_clients: int) -> tuple[ClientPrivacy, ...] | None:
    privacy = loaded.experiment.privacy
    if privacy is None:
        return None
    return resolve_client_privacy(
        privacy,
        num_clients=num_clients,
        seed=loaded.experiment.seed,
        tables=read_client_tables(privacy, loaded.base),
        clients_per_round=participation_of(loaded.experiment, num_clients).round_sizes[1],
    )


def with_plans(federation: Federation, loaded: LoadedExperiment) -> Federation:
    """Return a federation with the plans of other privacy settings, for the same data and model.

    Its model and its secure aggregation stay as they are, so it is good for plans alone.

    Args:
        federation: an assembled one.
        loaded: its experiment with another trust model, unit or budget.

    Raises:
        ValueError: no noise meets the settings; the message names the setting and the fix.
    """
    data = federation.data
    loaded = with_num_clients(loaded, len(data.clients))
    experiment = loaded.experiment
    participation = participation_of(experiment, len(data.clients))
    client_privacy = _client_privacy(loaded, len(data.clients))
    if client_privacy is None:
        raise ValueError("there is nothing to plan without privacy")
    algorithm = checked_algorithm(experiment, federation.model, len(data.clients), loaded.base)
    steps = StepSchedule.of(experiment, participation, client_privacy, data.clients.sizes)
    plans, weights, sums = _planned(
        experiment,
        client_privacy,
        data,
        steps,
        TrainedParts(federation.gradients, federation.shared_model),
        algorithm,
    )
    return replace(
        federation,
        experiment=experiment,
        participation=participation,
        steps=steps,
        client_privacy=client_privacy,
        plans=plans,
        weights=weights,
        sums=sums,
    )
