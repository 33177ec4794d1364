"""Rules of the data, the model, the evaluation metrics and the trackers."""

import os
from pathlib import Path

from fedsim.clients.local_settings import LocalSettings
from fedsim.core.metrics import (
    GROUP_ACCURACY,
    LOSS,
    METRICS,
    TASK_OF_LOSS,
    TaskName,
    computed_metrics,
    metric_key,
    wrong_task,
)
from fedsim.core.python_objects import PythonObject, file_instead
from fedsim.data.catalog import DATASETS, DatasetEntry
from fedsim.data.file_names import DATA_SUFFIXES, TABLE_SUFFIXES, TooManyFilesError, matching_files
from fedsim.data.settings import (
    ColumnPartition,
    DataSettings,
    FileDataset,
    FilesPartition,
    FlwrPartition,
    FunctionPartition,
    group_column,
)
from fedsim.data.tables.settings import ColumnSettings
from fedsim.experiment.errors import KeyPath, value_text
from fedsim.experiment.messages import Mistakes
from fedsim.experiment.rules import (
    Sections,
    args_messages,
    check_file,
    check_folder,
    check_name,
    finite_messages,
    messages_at,
    mistake,
    too_many_clients,
)
from fedsim.models.catalog import LOSSES, MODELS
from fedsim.models.settings import FeatureShapeError, ModelSettings, shape_after
from fedsim.personalization.settings import LabelPriorSettings, PersonalizationSettings
from fedsim.server.settings import EvaluationSettings, FederationSettings
from fedsim.simulation.settings import TRACKERS, RuntimeSettings

_DATASET: KeyPath = ("data", "dataset")
_ARGS: KeyPath = ("data", "args")
_PARTITION: KeyPath = ("data", "partition")


def check_data(data: DataSettings, base: Path) -> Mistakes:
    """Yield (key path, message) for every mistake in `data:`."""
    yield from finite_messages(data.args, _ARGS)
    yield from _check_images(data)
    yield from _check_partition(data, base)
    if isinstance(data.dataset, FileDataset):
        yield from _check_file_dataset(data, data.dataset, base)
        return
    yield from messages_at(_DATASET, check_name(data.dataset, "dataset", DATASETS, base))
    entry = DATASETS.get(data.dataset)
    if entry is None:
        return
    yield from _check_group(data, entry)
    if entry.args.model_fields:
        yield from args_messages(data.args, entry.args, _ARGS)
        if data.folder is not None:
            yield from messages_at((*_ARGS, "path"), check_folder(data.folder, base))
    elif data.args:
        yield _ARGS, f"the built-in dataset {data.dataset!r} takes no arguments; remove args"


def _check_group(data: DataSettings, entry: DatasetEntry) -> Mistakes:
    groups, wanted = entry.groups, group_column(data.partition)
    if groups is None or wanted is None or wanted in groups:
        return
    fix = f"it has {', '.join(map(repr, groups))}" if groups else "use another scheme"
    key = "column" if data.partition.scheme == "column" else "args.partition_by"
    why = f"{data.dataset} has no column {wanted!r} that names clients"
    yield mistake(f"data.partition.{key}: {why}; {fix}")


def _check_images(data: DataSettings) -> Mistakes:
    path: KeyPath = ("data", "images")
    if data.images is None:
        return
    if data.features == "tokens":
        yield mistake("data.images: images are numbers, and data.features is tokens; remove images")
    elif isinstance(data.dataset, FileDataset):
        if not str(data.dataset.path).lower().endswith(".npz"):
            yield path, "is for arrays in an .npz file, and the dataset is a table; remove images"
    elif data.dataset in DATASETS and data.dataset != "huggingface":
        yield path, f"the built-in dataset {data.dataset!r} has its layout and range; remove images"


def _check_partition(data: DataSettings, base: Path) -> Mistakes:
    """Yield mistakes in a partition that is given by a data column or a function."""
    division = data.partition
    if isinstance(division, FunctionPartition | FlwrPartition):
        yield from finite_messages(division.args, (*_PARTITION, "args"))
    if isinstance(division, FunctionPartition):
        problem = check_name(division.scheme, "partition scheme", (), base)
        yield from messages_at((*_PARTITION, "scheme"), problem)
    if not isinstance(division, FilesPartition):
        return
    if not isinstance(data.dataset, FileDataset):
        why = "scheme files reads tables, whose target is to be named"
        yield mistake(f"data.dataset: {why}; write dataset: {{target: COLUMN, columns: ...}}")
    try:
        files = matching_files(division.pattern, base)
    except TooManyFilesError as error:
        yield (*_PARTITION, "pattern"), str(error)
        return
    if not files:
        yield (*_PARTITION, "pattern"), f"no file matches {os.path.join(base, division.pattern)!r}"
    for path in files.values():
        problem = check_file(str(path), base, *TABLE_SUFFIXES)
        if problem is not None:
            yield mistake(f"data.partition.pattern: matches {path.name!r}, and a table {problem}")
            return


def _check_file_dataset(data: DataSettings, dataset: FileDataset, base: Path) -> Mistakes:
    if data.args:
        yield mistake("data.args: a data file takes no arguments; remove args")
    if isinstance(data.partition, FilesPartition):
        if dataset.path is not None:
            fix = "remove path, or use scheme: column"
            yield mistake(f"data.dataset.path: data.partition.pattern names the files; {fix}")
    elif dataset.path is None:
        purpose = FileDataset.model_fields["path"].description
        yield mistake(f"data.dataset.path: missing; {purpose}")
    else:
        yield from messages_at((*_DATASET, "path"), check_file(dataset.path, base, *DATA_SUFFIXES))
    if dataset.test is not None:
        yield from messages_at((*_DATASET, "test"), check_file(dataset.test, base, *TABLE_SUFFIXES))
        if data.test_fraction is not None:
            why = "dataset.test is the test set, so no rows are held out"
            yield mistake(f"data.test_fraction: {why}; remove one of them")
    if dataset.path is not None and dataset.path.lower().endswith(".npz"):
        for key in ("columns", "test"):
            if getattr(dataset, key):
                why = "is for .csv and .parquet tables, and an .npz archive holds arrays of numbers"
                own = f"(the archive's own test set: x_test and {dataset.target}_test)"
                yield mistake(f"data.dataset.{key}: {why}; remove {key} {own}")
    column = group_column(data.partition)
    if column is not None and column in dataset.columns:
        rule = "this column divides the rows among clients and is no feature; remove it here"
        yield (*_DATASET, "columns", column), rule
    if isinstance(data.partition, ColumnPartition) and column == dataset.target:
        why = f"{column!r} is the target, and a client would hold one class"
        yield mistake(f"data.partition.column: {why}; name another column, or use scheme: shards")
    for name, settings in dataset.columns.items():
        is_feature = isinstance(settings, ColumnSettings) and name != dataset.target
        if is_feature and data.features == "tokens":
            why = "makes numbers of the cells, and data.features is tokens"
            yield (*_DATASET, "columns", name), f"{why}; remove it, or drop the column"


def check_objects(data: DataSettings, model: ModelSettings, runtime: RuntimeSettings) -> Mistakes:
    """Yield (key path, message) for Python objects if clients run in other processes."""
    places = {"data.dataset": data.dataset, "model.name": model.name, "model.loss": model.loss}
    for path, given in places.items():
        if isinstance(given, PythonObject) and runtime.engine != "local":
            why = f"engine {runtime.engine} runs clients in other processes"
            fix = f"use engine: local, or {file_instead(given)}"
            yield mistake(f"{path}: {why}, which do not have this Python object; {fix}")


def check_model(model: ModelSettings, base: Path) -> Mistakes:
    """Yield (key path, message) for mistakes in names of model and loss, and in model arguments."""
    args: KeyPath = ("model", "args")
    yield from messages_at(("model", "loss"), check_name(model.loss, "loss", LOSSES, base))
    yield from messages_at(("model", "name"), check_name(model.name, "model", MODELS, base))
    if model.init is not None:
        yield from messages_at(("model", "init"), check_file(model.init, base, ".safetensors"))
    if model.name in MODELS:
        yield from args_messages(model.args, MODELS[model.name].args, args)
    else:
        yield from finite_messages(model.args, args)
    if model.has_local_base and model.freeze:
        why = "with model.train or model.lora all other parameters are frozen"
        yield mistake(f"model.freeze: {why}; remove freeze")
    if model.lora is not None and model.init is None and model.name in MODELS:
        why = f"the weights of {model.name!r} would come from the seed"
        fix = "add init: weights.safetensors"
        yield mistake(f"model.lora: adapters need a trained backbone, and {why}; {fix}")


def check_features(sections: Sections) -> Mistakes:
    """Yield (key path, message) for mistakes in `data.features` and `model.features`."""
    model, data = sections.model, sections.data
    if model is not None:
        yield from _check_transforms(model, data)
    if data is None:
        return
    if (entry := DATASETS.get(str(data.dataset))) is not None:
        problem = data.features_mistake(has_tokens=entry.tokens)
        yield from messages_at(("data", "features"), problem)
    if data.features == "tokens" and model is not None and model.name in MODELS:
        fix = "use a model of your own that begins with an embedding, or features: numbers"
        yield mistake(f"data.features: the built-in model {model.name!r} takes numbers; {fix}")


def _check_transforms(model: ModelSettings, data: DataSettings | None) -> Mistakes:
    """Check the shapes of `model.features`, starting from the dataset's shape if it is known."""
    features: KeyPath = ("model", "features")
    if model.features and data is not None and data.features == "tokens":
        yield features, "transforms take numbers, and data.features is tokens; remove features"
        return
    entry = None if data is None else DATASETS.get(str(data.dataset))
    try:
        shape = shape_after(model.features, None if entry is None else entry.shape)
    except FeatureShapeError as error:
        yield (*features, error.position), error.reason
        return
    if model.features and model.name == "cnn" and shape is not None and len(shape) != 3:
        why = f"cnn takes images (channels, height, width), and model.features gives {shape}"
        yield mistake(f"model.name: {why}; use logistic or mlp")


def check_views(local: LocalSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) if the requested augmentation does not suit the examples."""
    data, model = sections.data, sections.model
    if local.views is None:
        return
    key = "augmentation_multiplicity" if local.augmentations is None else "augmentations"
    fix = "remove augmentation_multiplicity and augmentations"
    if data is not None and data.features == "tokens":
        why = "views shift, mirror or blur numbers, and data.features is tokens"
        yield mistake(f"local.{key}: {why}; {fix}")
    if model is not None and model.features:
        why = "views are drawn anew in each step, and model.features transforms each example once"
        yield mistake(f"local.{key}: {why}, before training; {fix}, or model.features")


def check_test_metrics(evaluation: EvaluationSettings, base: Path, sections: Sections) -> Mistakes:
    """Yield (key path, message) for mistakes in `evaluation.metrics`; no plug-in is imported."""
    model = sections.model
    keys = {LOSS: "loss, which is always computed"}
    task = None if model is None else TASK_OF_LOSS.get(model.loss)
    yield from _check_test_group(evaluation, sections, task)
    for index, name in enumerate(evaluation.metrics or ()):
        path: KeyPath = ("evaluation", "metrics", index)
        key = metric_key(name)
        if name == LOSS:
            yield path, "loss is always computed; remove it"
        elif (problem := check_name(name, "metric", METRICS, base)) is not None:
            yield path, problem
        elif keys.get(key) == name:
            yield path, f"{name} is named twice; remove one"
        elif key in keys or (":" in name and key in METRICS):
            other = keys.get(key, f"the built-in metric {key}")
            yield path, f"{name} has the name of {other}; remove or rename one"
        elif ":" not in name and task is not None:
            yield from messages_at(path, wrong_task(name, task))
        keys.setdefault(key, name)


def _check_test_group(
    evaluation: EvaluationSettings, sections: Sections, task: TaskName | None
) -> Mistakes:
    path: KeyPath = ("evaluation", "group")
    if evaluation.group is None:
        if GROUP_ACCURACY in (evaluation.metrics or ()):
            yield path, f"missing; {GROUP_ACCURACY} needs the column that names the groups"
        return
    if task == "regression":
        yield path, "groups have accuracies, and this model predicts numbers; remove it"
    entry = None if sections.data is None else DATASETS.get(str(sections.data.dataset))
    if entry is not None and entry.groups is not None and evaluation.group not in entry.groups:
        has = f"it has {', '.join(map(repr, entry.groups))}" if entry.groups else "remove it"
        yield path, f"the dataset has no column {evaluation.group!r} that names groups; {has}"


def check_early_stopping(
    federation: FederationSettings, model: ModelSettings, sections: Sections
) -> Mistakes:
    """Yield (key path, message) for mistakes in the metric of `federation.early_stopping`."""
    evaluation = sections.evaluation
    if federation.early_stopping is None:
        return
    metric = federation.early_stopping.metric
    chosen = None if evaluation is None else evaluation.metrics
    # The task of a loss of one's own is known later.
    known = computed_metrics(model.loss, chosen) or (LOSS, "accuracy", "mse", "r2")
    if metric not in known:
        rule = f"must be one of {', '.join(known)}, the numbers of the test set, got {metric!r}"
        fix = "choose one, or add it to evaluation.metrics"
        yield mistake(f"federation.early_stopping.metric: {rule}; {fix}")


def check_evaluation(evaluation: EvaluationSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for mistakes in the evaluation on clients' held-out examples."""
    if evaluation.holdout is None:
        return
    if sections.privacy is not None:
        why = "is a release that no ε of this experiment covers"
        fix = "remove holdout (evaluation.holdout=null)"
        free = "scores on the server's public test set cost nothing"
        path = "evaluation.holdout"
        yield mistake(f"{path}: a client's score on its own examples {why}; {fix}: {free}")
    if sections.secure_aggregation is not None:
        why = "clients send their scores in clear, beside updates that secure_aggregation hides"
        fix = "remove holdout, or the section secure_aggregation"
        yield mistake(f"evaluation.holdout: {why}; {fix}")


def check_evaluated_clients(evaluation: EvaluationSettings, num_clients: int) -> Mistakes:
    """Yield (key path, message) if `evaluation.clients` is above the number of clients."""
    yield from too_many_clients(("evaluation", "clients"), evaluation.clients, num_clients)


def check_personalization(personalization: PersonalizationSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for mistakes in `personalization`."""
    model, evaluation, privacy = sections.model, sections.evaluation, sections.privacy
    loss = None if model is None else model.loss
    is_prior = isinstance(personalization, LabelPriorSettings)
    if is_prior and loss in LOSSES and loss != "cross_entropy":
        why = f"label_prior shifts the logits of classes, and model.loss {loss} has no classes"
        yield mistake(f"personalization.method: {why}; use method: fine_tune or ditto")
    holdout = personalization.holdout
    if holdout is None:
        return
    if evaluation is not None and evaluation.holdout not in (None, holdout):
        own, other = value_text(holdout), value_text(evaluation.holdout)
        rule = f"a client holds out its examples once: got {own}, and evaluation.holdout is {other}"
        yield mistake(f"personalization.holdout: {rule}; set both to one number")
    if privacy is not None and privacy.adjacency.name == "add_remove":
        why = "one more example would change which ones a client holds out"
        more = "so more than one example of its training"
        fix = "remove holdout, or use adjacency: zero_out"
        yield mistake(f"personalization.holdout: {why}, and {more}; {fix}")


def check_trackers(runtime: RuntimeSettings, base: Path) -> Mistakes:
    """Yield (key path, message) for mistakes in `runtime.trackers`; no plug-in is imported."""
    for index, name in enumerate(runtime.trackers):
        problem = check_name(name, "tracker", TRACKERS, base)
        yield from messages_at(("runtime", "trackers", index), problem)
