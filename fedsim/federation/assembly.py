"""Assembly of a federation from an experiment: load the data, build the model, plan the privacy.

Batch sizes are checked against client sizes with privacy only. Without privacy, a client with fewer
examples than `batch_size` has all of them in each batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high

import torch

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.app import one_thread
from fedsim.clients.gradients.example_randomness import check_views
from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd.draft import whole_round_steps
from fedsim.clients.mechanisms.plan import Accounting, PrivacyBudgetError, PrivacyPlan
from fedsim.clients.model_checks.safety import check_private_model
from fedsim.core.commands import Phases
from fedsim.core.formatting import clients_text, epsilon_text
from fedsim.core.plugin_errors import plugin_calls
from fedsim.core.plugin_sources import read_sources
from fedsim.data import DataError, Examples, FederatedData, load_federated_data
from fedsim.experiment import Experiment, LoadedExperiment
from fedsim.experiment.load import with_clients
from fedsim.federation.federation import Federation, goal_of
from fedsim.federation.first_checks import checked_algorithm
from fedsim.federation.plan import plan_of, schedule_of
from fedsim.federation.trained_model import (
    NUM_CHECK_EXAMPLES,
    NUM_PROBE_EXAMPLES,
    FederationModel,
    choose_device,
    federation_model,
    initial_model,
    model_arrays,
    order_by_client,
    public_examples,
    still_parameters_of,
    to_tensors,
)
from fedsim.models.build import preflight
from fedsim.models.catalog import ModelError
from fedsim.models.features.transforms import FeaturePipeline
from fedsim.models.local_base import local_base
from fedsim.models.losses import resolve_loss
from fedsim.models.tasks import Task, task_for
from fedsim.protocol.arrays import upload_base
from fedsim.statement.facts import clients_with_large_delta

_MAX_RATE_RATIO = 3.0  # largest sampling rate over the median that needs no warning


def check_batch_size(experiment: Experiment, sizes: Sequence[int]) -> None:
    """Check that `batch_size` is not above the size of every client.

    Nothing is checked where `batch_size` does not set the clients' sampling rates.

    Args:
        experiment: the settings.
        sizes: the number of examples of each client.

    Raises:
        DataError: `batch_size` is above the declared size of every client.
    """
    batch, declared = experiment.local.batch_size, _declared_sizes(experiment, sizes)
    if batch != "full" and declared and batch > max(declared):
        largest = max(declared)
        raise DataError(
            f"local.batch_size: {batch:,} is above the size of every client, at most {largest:,}; "
            "set local.batch_size=full for batches of all examples, or a smaller number"
        )


def full_batch_note(experiment: Experiment, sizes: Sequence[int]) -> str | None:
    """Return a warning if the batch size is too large for the smallest clients, else None.

    With one batch size for all, the smallest client has the largest sampling rate, and so the most
    noise. The warning is given if the batch size exceeds a client's number of examples, or if the
    largest rate is far above the median.

    Args:
        experiment: the settings.
        sizes: the number of examples of each client.
    """
    batch = experiment.local.batch_size
    declared = [size for size in _declared_sizes(experiment, sizes) if size > 0]
    if batch == "full" or not declared:
        return None
    rates = [min(1.0, batch / size) for size in declared]
    usual, largest = median_high(rates), max(rates)
    small = [size for size in declared if size < batch]
    if not small and largest <= _MAX_RATE_RATIO * usual:
        return None
    fix = f"; privacy.sampling.rate={usual:.2g} gives every client the same rate"
    if small:
        return (
            f"local.batch_size = {batch:,} is above the size of {len(small):,} of {len(sizes):,} "
            f"clients (the smallest has {min(small):,} examples): their sampling rate is 1, which "
            f"gives no amplification{'' if usual == 1.0 else fix}"
        )
    return (
        f"local.batch_size = {batch:,} is a sampling rate of {largest:.2g} for the smallest client "
        f"({min(declared):,} examples) and {usual:.2g} for the median client: small clients get "
        f"the most noise{fix}"
    )


def privacy_warnings(federation: Federation) -> list[str]:
    """Return warnings about a δ that is too large, and about constants from private rows."""
    plans, lines = federation.plan.clients or (), list[str]()
    protects_clients = federation.experiment.release_kind.protects_client
    loose = clients_with_large_delta(
        [plan.delta for plan in plans],
        [plan.examples for plan in plans],
        protects_clients=protects_clients,
    )
    if loose:
        of, unit = f"examples for {clients_text(loose)}", "a whole example"
        if protects_clients:
            of, unit = "the number of clients", "everything of one client"
        lines.append(
            f"δ is not below 1 / {of}: such a δ allows publishing {unit}; choose a smaller "
            "privacy.delta"
        )
    if plans and "constants" in (federation.experiment.public_parts or {}):
        lines.append(
            "the constants of columns were read from the rows, and no ε covers that "
            "(data.dataset.constants: from_rows); before an ε is published, put public constants "
            "into data.dataset.columns and remove the key"
        )
    return lines


def _declared_sizes(experiment: Experiment, sizes: Sequence[int]) -> Sequence[int]:
    """Return the public client sizes that set sampling rates; empty if `batch_size` sets none."""
    privacy = experiment.privacy
    if (
        privacy is None
        or not privacy.release_kind.draws_batches
        or privacy.sampling.rate is not None
    ):
        return ()
    declared = privacy.adjacency.declared_examples
    return sizes if declared is None else [declared] * len(sizes)


@dataclass(frozen=True)
class Overdrawn:
    """A client whose planned steps cost more than its privacy budget.

    Attributes:
        client: the client's number.
        plan: the client's privacy plan.
        last_round: the last round in which the client can take a step; 0 if there is none.
    """

    client: int
    plan: PrivacyPlan
    last_round: int


def last_round(federation: Federation, client: int) -> int:
    """Return the last round in which a client's budget still covers a step, if no round fails.

    The result is 0 if the budget covers no step.
    """
    plan, scheduled = federation.plan, federation.plan.participation.rounds_of(client)
    count = len(scheduled)
    if plan.clients is not None:
        count = plan.steps.rounds_in(client, plan.clients[client].steps_to_take)
    return scheduled[count - 1] if count else 0


def refuse_overspending(federation: Federation) -> None:
    """Check, before training, that the clients' privacy budgets cover the plan.

    With `privacy.on_exhausted: refuse`, the budget of every client must cover all its planned
    steps. Otherwise the budget of at least one client must cover one step.

    Raises:
        PrivacyBudgetError: the budgets do not suffice; the message says how many rounds the budget
            covers.
    """
    privacy = federation.experiment.privacy
    overdrawn = [
        Overdrawn(client, plan, last_round(federation, client))
        for client, plan in enumerate(federation.plan.clients or ())
        if plan.steps_to_take < plan.planned_steps
    ]
    if privacy is None or not overdrawn:
        return
    if privacy.on_exhausted == "refuse":
        raise PrivacyBudgetError(_refusal(federation, overdrawn))
    if all(plan.steps_to_take == 0 for plan in federation.plan.clients or ()):
        raise PrivacyBudgetError(
            f"no client can take a single step: {_spending(federation, overdrawn[0], 1)}; raise "
            "target_epsilon, delta or noise_multiplier"
        )


def _refusal(federation: Federation, overdrawn: Sequence[Overdrawn]) -> str:
    worst = min(overdrawn, key=lambda client: client.last_round)
    others = f" ({len(overdrawn)} clients exceed their budgets)" if len(overdrawn) > 1 else ""
    rounds = min(_whole_rounds(federation, client) for client in overdrawn)
    fits = (
        f"at most {rounds} of {federation.experiment.federation.rounds} rounds fit every budget: "
        f"set federation.rounds={rounds}"
        if rounds
        else "not even one round fits every budget: raise target_epsilon or noise_multiplier"
    )
    spending = _spending(federation, worst, worst.plan.planned_steps)
    return f"a privacy budget forbids this plan: {spending}{others}; {fits}{_way_out(federation)}"


def _whole_rounds(federation: Federation, overdrawn: Overdrawn) -> int:
    """Return the largest number of rounds after which the client's budget is not exceeded."""
    plan, client = federation.plan, overdrawn.client
    whole = plan.steps.whole_rounds_in(client, overdrawn.plan.steps_to_take)
    return plan.participation.rounds_of(client)[whole] - 1


def _way_out(federation: Federation) -> str:
    """Return the second fix that a message offers; correlated noise is charged per whole run."""
    privacy = federation.experiment.privacy
    if privacy is not None and privacy.is_correlated:
        return ", or leave noise_multiplier out, which calibrates it for you"
    return ", or let clients leave when their budget is spent with privacy.on_exhausted=withdraw"


def _spending(federation: Federation, overdrawn: Overdrawn, steps: int) -> str:
    privacy = federation.experiment.privacy
    if privacy is None:
        raise ValueError("a federation without privacy spends nothing")
    plan = overdrawn.plan
    epsilon = Accounting.of(privacy, plan.delta).epsilon(plan.charges(0, steps))
    return (
        f"{steps} step{'s' if steps > 1 else ''} of client {overdrawn.client} with "
        f"noise_multiplier {plan.noise_multiplier:.4g} would spend ε = "
        f"{epsilon_text(epsilon)} at δ = {plan.delta:g}, and its target_epsilon is "
        f"{plan.target_epsilon:g}"
    )


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
    sources = read_sources(settings.plugins, base=base)
    data = _load(settings, base)
    experiment = with_clients(loaded, len(data.clients))
    queries: Examples | None = None
    if experiment.pate is not None:
        from fedsim.pate.public_answers import with_queries

        data, queries = with_queries(data, experiment.pate.queries, seed=experiment.seed)
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
    if experiment.metrics is not None or data.test_groups is not None:
        federation.public_scores.check()
    sources.refuse_edited(read_sources(experiment.plugins, base=base))
    return federation


def _load(settings: Experiment, base: Path) -> FederatedData:
    return load_federated_data(
        settings.data,
        seed=settings.seed,
        base=base,
        holdout=settings.holdout,
        group=None if settings.evaluation is None else settings.evaluation.group,
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
