"""Rules that join several sections, or check names outside of the file.

A rule runs if the sections that it reads are valid; the others may have mistakes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fedsim.clients.client_settings import is_client
from fedsim.clients.faults.settings import FaultSettings
from fedsim.clients.settings import LocalSettings, PrivacySettings
from fedsim.core.limits import MAX_LEDGER_RECORDS
from fedsim.data.catalog import DATASETS, SHAPES
from fedsim.data.settings import DataSettings, FileDataset
from fedsim.experiment.messages import PathMessage, validation_messages
from fedsim.experiment.participation_rules import check_poisson_draws
from fedsim.experiment.references import check_data_file, check_name, check_table, check_weights
from fedsim.experiment.text import KeyPath, value_text
from fedsim.experiment.trust_rules import check_trust
from fedsim.models.catalog import LOSSES, MODELS, TRAIN_METRICS
from fedsim.models.features.shapes import FeatureShapeError, shape_after
from fedsim.models.scores.catalog import LOSS, METRICS, TASK_OF_LOSS, metric_key, wrong_task
from fedsim.models.settings import ModelSettings
from fedsim.personalization.settings import LabelPriorSettings, PersonalizationSettings
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.aggregation.strategy_settings import STRATEGIES
from fedsim.server.settings import EvaluationSettings, FederationSettings


@dataclass(frozen=True)
class Sections:
    """The valid sections of a file; None for a section with mistakes.

    Those with a default of None are also None if the file has no such section, and so is `privacy`.
    `mistaken` names the sections with mistakes.
    """

    data: DataSettings | None
    model: ModelSettings | None
    federation: FederationSettings | None
    privacy: PrivacySettings | None
    local: LocalSettings | None = None
    faults: tuple[FaultSettings, ...] = ()
    secure_aggregation: SecureAggregationSettings | None = None
    evaluation: EvaluationSettings | None = None
    personalization: PersonalizationSettings | None = None
    mistaken: frozenset[object] = frozenset()


def check_rules(sections: Sections, base: Path) -> Iterator[PathMessage]:
    """Yield (path, message) for every broken rule.

    Args:
        sections: the valid sections.
        base: the directory in which relative paths start.
    """
    if sections.data is not None:
        yield from _check_data(sections.data, base)
    if sections.model is not None:
        yield from _check_model(sections.model, base)
    yield from _check_features(sections)
    if sections.federation is not None:
        yield from _check_strategy(sections.federation, base)
    yield from _check_participation(sections)
    if sections.federation is not None:
        yield from check_poisson_draws(
            sections.federation, sections.privacy, sections.secure_aggregation
        )
    yield from _check_weighting(sections)
    yield from _check_sampling_rate(sections)
    yield from _check_budgets(sections)
    yield from _check_faults(sections)
    yield from _check_secure_aggregation(sections)
    yield from _check_test_metrics(sections, base)
    yield from _check_evaluation(sections)
    yield from _check_personalization(sections)
    yield from _check_views(sections)
    if sections.privacy is not None:
        if "secure_aggregation" not in sections.mistaken:
            yield from check_trust(
                sections.privacy, sections.local, sections.federation, sections.secure_aggregation
            )
        yield from _check_budget_files(sections.privacy, base)


def _check_data(data: DataSettings, base: Path) -> Iterator[PathMessage]:
    args: KeyPath = ("data", "args")
    yield from _check_finite(data.args, args)
    if isinstance(data.dataset, FileDataset):
        yield from _at(("data", "dataset", "path"), check_data_file(data.dataset.path, base))
        if data.args:
            yield args, "a data file takes no arguments; remove args"
        return
    yield from _at(("data", "dataset"), check_name(data.dataset, "dataset", DATASETS, base))
    if data.dataset in DATASETS and data.args:
        yield args, f"the built-in dataset {data.dataset!r} takes no arguments; remove args"


def _check_model(model: ModelSettings, base: Path) -> Iterator[PathMessage]:
    args: KeyPath = ("model", "args")
    yield from _at(("model", "loss"), check_name(model.loss, "loss", LOSSES, base))
    yield from _at(("model", "name"), check_name(model.name, "model", MODELS, base))
    if model.init is not None:
        yield from _at(("model", "init"), check_weights(model.init, base))
    if model.name not in MODELS:
        yield from _check_finite(model.args, args)
        return
    entry = MODELS[model.name]
    try:
        entry.args.model_validate(model.args)
    except ValidationError as error:
        yield from validation_messages(error, model.args, entry.args, args)


def _check_strategy(federation: FederationSettings, base: Path) -> Iterator[PathMessage]:
    path: KeyPath = ("federation", "strategy")
    named = federation.strategy_settings
    place = path if isinstance(federation.strategy, str) else (*path, "name")
    yield from _at(place, check_name(named.name, "strategy", STRATEGIES, base))
    if named.name not in STRATEGIES:
        yield from _check_finite(named.options, path)
        return
    settings = STRATEGIES[named.name].settings
    try:
        settings.model_validate(named.options)
    except ValidationError as error:
        yield from validation_messages(error, named.options, settings, path)


def _check_features(sections: Sections) -> Iterator[PathMessage]:
    if sections.model is not None:
        yield from _check_transforms(sections.model, sections.data)
    if sections.data is None or sections.data.features != "tokens":
        return
    path: KeyPath = ("data", "features")
    if isinstance(sections.data.dataset, str) and sections.data.dataset in DATASETS:
        yield path, f"{sections.data.dataset} has numbers, no tokens; remove features"
    if sections.model is not None and sections.model.name in MODELS:
        yield (
            path,
            f"the built-in model {sections.model.name!r} takes numbers; use a model of your "
            "own that begins with an embedding, or features: numbers",
        )


def _check_transforms(model: ModelSettings, data: DataSettings | None) -> Iterator[PathMessage]:
    """Check the shapes of `model.features`, from the shape of the dataset where it is known."""
    features: KeyPath = ("model", "features")
    if model.features and data is not None and data.features == "tokens":
        yield features, "transforms take numbers, and data.features is tokens; remove features"
        return
    named = data.dataset if data is not None and isinstance(data.dataset, str) else ""
    try:
        shape = shape_after(model.features, SHAPES.get(named))
    except FeatureShapeError as error:
        yield (*features, error.position), error.reason
        return
    if model.features and model.name == "cnn" and shape is not None and len(shape) != 3:
        yield (
            ("model", "name"),
            f"cnn takes images (channels, height, width), and model.features gives {shape}; "
            "use logistic or mlp",
        )


def _check_participation(sections: Sections) -> Iterator[PathMessage]:
    if sections.federation is None or sections.data is None:
        return
    per_round = sections.federation.clients_per_round
    clients = sections.data.partition.num_clients
    if per_round is not None and per_round > clients:
        path = ("federation", "clients_per_round")
        rule = f"must be <= data.partition.num_clients ({value_text(clients)})"
        yield path, f"{rule}, got {value_text(per_round)}"
    rounds = sections.federation.rounds
    charged = per_round or clients
    if sections.federation.participation.scheme == "poisson" and sections.privacy is not None:
        charged = clients  # also those that were not drawn
    records = rounds * charged
    if records > MAX_LEDGER_RECORDS:
        yield (
            ("federation", "rounds"),
            f"{rounds:,} rounds of {charged:,} clients are {records:,} records of the "
            f"ledger, which holds at most {MAX_LEDGER_RECORDS:,}; lower rounds or "
            "clients_per_round",
        )


def _check_weighting(sections: Sections) -> Iterator[PathMessage]:
    if sections.federation is None:
        return
    path: KeyPath = ("federation", "weighting")
    weights, privacy = sections.federation.weights, sections.privacy
    if weights.uses_sizes and privacy is not None and privacy.adjacency == "add_remove":
        other = ", size_power: 0" if weights.name == "noise" else ""
        yield (
            path,
            f"'{weights.name}' would reveal client sizes, which adjacency add_remove keeps "
            f"private; use weighting: uniform{other} or adjacency: zero_out",
        )
    if sections.data is None or weights.max_share is None:
        return
    clients = sections.federation.clients_per_round or sections.data.partition.num_clients
    if weights.max_share * clients < 1:
        yield (
            (*path, "max_share"),
            f"must be at least 1/{clients}, the share of each of the {clients} clients of a round "
            f"under equal weights, got {value_text(weights.max_share)}; raise it",
        )


def _check_sampling_rate(sections: Sections) -> Iterator[PathMessage]:
    local, privacy = sections.local, sections.privacy
    if local is None or privacy is None or privacy.sampling_rate is None:
        return
    if local.batch_size == "full":
        rate = value_text(privacy.sampling_rate)
        yield (
            ("privacy", "sampling_rate"),
            f"local.batch_size: full is a sampling rate of 1, and privacy.sampling_rate is {rate}; "
            "remove sampling_rate, or write a number for batch_size",
        )


def _check_budgets(sections: Sections) -> Iterator[PathMessage]:
    if sections.privacy is None or sections.data is None:
        return
    clients = sections.data.partition.num_clients
    rule = _unknown_client(clients)
    for name, entry in sections.privacy.clients.items():
        path: KeyPath = ("privacy", "clients", name)
        if is_client(name) and int(name) >= clients:
            yield path, rule
        for position, member in enumerate(entry.members or ()):
            if member >= clients:
                yield (*path, "members", position), rule


def _check_faults(sections: Sections) -> Iterator[PathMessage]:
    clients = None if sections.data is None else sections.data.partition.num_clients
    for position, fault in enumerate(sections.faults):
        for place, client in enumerate(fault.clients or ()):
            if clients is not None and client >= clients:
                yield ("faults", position, "clients", place), _unknown_client(clients)
        no_deadline = sections.federation is not None and sections.federation.deadline is None
        if fault.kind == "straggler" and no_deadline:
            yield (
                ("faults", position),
                "a straggler needs a deadline to miss; set federation.deadline, in seconds",
            )


def _unknown_client(clients: int) -> str:
    return (
        f"no such client; use a number from 0 to {clients - 1} "
        f"(data.partition.num_clients is {clients})"
    )


def _check_secure_aggregation(sections: Sections) -> Iterator[PathMessage]:
    secure = sections.secure_aggregation
    if secure is None or sections.federation is None or sections.data is None:
        return
    section: KeyPath = ("secure_aggregation",)
    clients = sections.federation.clients_per_round or sections.data.partition.num_clients
    if secure.min_clients > clients:
        yield (
            (*section, "min_clients"),
            f"must be at most {clients}, the clients of a round, got {secure.min_clients}; lower "
            "it, or raise federation.clients_per_round",
        )
    if secure.threshold != "auto" and not clients // 2 < secure.threshold <= clients:
        yield (
            (*section, "threshold"),
            f"must be above half of the {clients} clients of a round and at most all of them, got "
            f"{secure.threshold}; use auto",
        )
    privacy = sections.privacy
    if privacy is not None and privacy.clipping == "adaptive" and not privacy.counts_in_sums:
        yield (
            ("privacy", "clipping"),
            "adaptive sends each client's adapted bound to the server in clear, beside updates "
            "that secure_aggregation hides; use clipping: flat, or remove secure_aggregation",
        )
    yield from _check_client_keys(secure, sections.data.partition.num_clients)
    yield from _check_metrics(secure.metrics, private=sections.privacy is not None)
    # Imported here: numpy is slow to import, and most files do not need it.
    from fedsim.secagg.encoding import FixedPointEncoder
    from fedsim.secagg.errors import CapacityError
    from fedsim.secagg.metrics import MetricGrids

    weighted = not sections.federation.weights.is_uniform
    try:
        encoder = FixedPointEncoder.from_settings(secure, num_clients=clients, weighted=weighted)
        MetricGrids.from_bounds(secure.metrics, encoder)
    except CapacityError as error:
        yield section, f"the sum does not fit into the ring: {error}"


def _check_client_keys(secure: SecureAggregationSettings, clients: int) -> Iterator[PathMessage]:
    for name in ("client_key_fingerprints", "client_key_files"):
        if len(getattr(secure, name)) not in (0, clients):
            yield (
                ("secure_aggregation", name),
                f"names {len(getattr(secure, name))} keys for {clients} clients "
                "(data.partition.num_clients); name one for each client, in their order, or none",
            )


def _check_metrics(metrics: Mapping[str, float], *, private: bool) -> Iterator[PathMessage]:
    section: KeyPath = ("secure_aggregation", "metrics")
    if metrics and private:
        yield (
            section,
            "means over private examples have no noise, and no ε covers them or their sum; remove "
            "metrics, or set privacy: null",
        )
        return
    for name in metrics:
        if name not in TRAIN_METRICS:
            known = ", ".join(TRAIN_METRICS)
            yield (*section, name), f"no such metric; choose from {known}"


def _check_test_metrics(sections: Sections, base: Path) -> Iterator[PathMessage]:
    """Yield the mistakes in `evaluation.metrics` that show without data and plug-ins."""
    if sections.evaluation is None:
        return
    keys = {LOSS: "loss, which is always computed"}
    task = None if sections.model is None else TASK_OF_LOSS.get(sections.model.loss)
    for index, name in enumerate(sections.evaluation.metrics or ()):
        path: KeyPath = ("evaluation", "metrics", index)
        if (problem := check_name(name, "metric", METRICS, base)) is not None:
            yield path, problem
            continue
        key = metric_key(name)
        if key in keys or (":" in name and key in METRICS):
            other = keys.get(key, f"the built-in metric {key}")
            yield path, f"{name} has the name of {other}; remove or rename one"
        elif ":" not in name and task is not None:
            yield from _at(path, wrong_task(name, task))
        keys.setdefault(key, name)


def _check_evaluation(sections: Sections) -> Iterator[PathMessage]:
    if sections.evaluation is None or sections.evaluation.holdout is None:
        return
    section: KeyPath = ("evaluation", "holdout")
    if sections.privacy is not None:
        yield (
            section,
            "a client's score on its own examples is a release that no ε of this experiment "
            "covers; remove holdout (evaluation.holdout=null): scores on the server's public test "
            "set cost nothing",
        )
    if sections.secure_aggregation is not None:
        yield (
            section,
            "clients send their scores in clear, beside updates that secure_aggregation hides; "
            "remove holdout, or the section secure_aggregation",
        )
    evaluated = sections.evaluation.clients
    clients = None if sections.data is None else sections.data.partition.num_clients
    if evaluated is not None and clients is not None and evaluated > clients:
        rule = f"must be <= data.partition.num_clients ({value_text(clients)})"
        yield ("evaluation", "clients"), f"{rule}, got {value_text(evaluated)}"


def _check_personalization(sections: Sections) -> Iterator[PathMessage]:
    personal = sections.personalization
    if personal is None:
        return
    section: KeyPath = ("personalization",)
    loss = None if sections.model is None else sections.model.loss
    if isinstance(personal, LabelPriorSettings) and loss in LOSSES and loss != "cross_entropy":
        yield (
            (*section, "method"),
            f"label_prior shifts the logits of classes, and model.loss {loss} has no classes; use "
            "method: fine_tune or ditto",
        )
    if personal.holdout is None:
        return
    evaluation = sections.evaluation
    if evaluation is not None and evaluation.holdout not in (None, personal.holdout):
        yield (
            (*section, "holdout"),
            f"a client holds out its examples once: got {value_text(personal.holdout)}, and "
            f"evaluation.holdout is {value_text(evaluation.holdout)}; set both to one number",
        )
    if sections.privacy is not None and sections.privacy.adjacency == "add_remove":
        yield (
            (*section, "holdout"),
            "one more example would change which ones a client holds out, and so more than one "
            "example of its training; remove holdout, or use adjacency: zero_out",
        )


def _check_views(sections: Sections) -> Iterator[PathMessage]:
    if sections.local is None or sections.local.views is None:
        return
    key = "augmentations" if sections.local.augment is None else "augment"
    if sections.data is not None and sections.data.features == "tokens":
        yield (
            ("local", key),
            "views shift, mirror or blur numbers, and data.features is tokens; remove "
            "augmentations and augment",
        )
    if sections.model is not None and sections.model.features:
        yield (
            ("local", key),
            "views are drawn anew in each step, and model.features transforms each example once, "
            "before training; remove augmentations and augment, or model.features",
        )


def _check_budget_files(privacy: PrivacySettings, base: Path) -> Iterator[PathMessage]:
    for name, entry in privacy.clients.items():
        if entry.csv is not None:
            yield from _at(("privacy", "clients", name, "csv"), check_table(entry.csv, base))


def _check_finite(value: object, path: KeyPath) -> Iterator[PathMessage]:
    """Yield a message for every infinite number and NaN in free-form arguments."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, got {value_text(value)}"
    children: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, item in children:
        yield from _check_finite(item, (*path, key))


def _at(path: KeyPath, message: str | None) -> Iterator[PathMessage]:
    if message is not None:
        yield path, message
