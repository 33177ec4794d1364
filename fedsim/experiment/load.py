"""Read an experiment: the schema, then the rules between its keys; all mistakes at once.

A rule runs if the sections that it reads are valid; the others may have mistakes.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedsim.clients.client_settings import FaultSettings
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.limits import MAX_FILE_BYTES
from fedsim.data.settings import DataSettings
from fedsim.experiment.errors import ExperimentError, Problem, value_text
from fedsim.experiment.messages import PathMessage, validation_messages
from fedsim.experiment.overrides import Overrides, apply_overrides, parse_overrides
from fedsim.experiment.references import check_name, read_public_tables
from fedsim.experiment.rules.algorithm import check_algorithm
from fedsim.experiment.rules.clients import (
    check_budget_files,
    check_budgets,
    check_faults,
    check_partial_work,
    check_participation,
    check_poisson_draws,
    check_sampling_rate,
    check_schemes,
    check_weighting,
)
from fedsim.experiment.rules.data import (
    check_data,
    check_early_stopping,
    check_evaluation,
    check_features,
    check_model,
    check_personalization,
    check_test_metrics,
    check_views,
)
from fedsim.experiment.rules.mechanisms import check_pate, check_perturbation, check_zeroth_order
from fedsim.experiment.rules.sections import Sections, messages_at
from fedsim.experiment.rules.trust import check_secure_aggregation, check_trust
from fedsim.experiment.schema import Experiment
from fedsim.experiment.shapes import field_purpose
from fedsim.experiment.tree import Location, Node, from_python, is_broken, locate, to_python
from fedsim.experiment.yaml_loader import parse_yaml
from fedsim.models.settings import ModelSettings
from fedsim.pate.settings import PateSettings
from fedsim.personalization.settings import PersonalizationSettings
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.settings import EvaluationSettings, FederationSettings
from fedsim.simulation.settings import TRACKERS, RuntimeSettings

_LR_SCHEDULE = ("local", "lr_schedule")


def check_rules(sections: Sections, base: Path) -> Iterator[PathMessage]:
    """Yield (path, message) for every broken rule.

    Args:
        sections: the valid sections.
        base: the directory in which relative paths start.
    """
    if sections.data is not None:
        yield from check_data(sections.data, base)
    if sections.model is not None:
        yield from check_model(sections.model, base)
    yield from check_features(sections)
    yield from check_algorithm(sections, base)
    yield from check_participation(sections)
    yield from check_schemes(sections)
    yield from check_partial_work(sections)
    if sections.federation is not None:
        yield from check_poisson_draws(
            sections.federation, sections.privacy, sections.secure_aggregation
        )
    yield from check_weighting(sections)
    yield from check_sampling_rate(sections)
    yield from check_perturbation(sections)
    yield from check_lr_schedule(sections)
    yield from check_budgets(sections)
    yield from check_faults(sections)
    yield from check_secure_aggregation(sections)
    yield from check_test_metrics(sections, base)
    yield from check_early_stopping(sections)
    yield from check_evaluation(sections)
    yield from check_personalization(sections)
    yield from check_views(sections)
    yield from check_pate(sections)
    yield from check_zeroth_order(sections)
    if sections.privacy is not None:
        if "secure_aggregation" not in sections.mistaken:
            yield from check_trust(
                sections.privacy,
                sections.local,
                sections.federation,
                sections.secure_aggregation,
                votes=sections.task == "pate",
            )
        yield from check_budget_files(sections.privacy, base)
    if sections.runtime is not None:
        yield from check_trackers(sections.runtime, base)


def check_trackers(runtime: RuntimeSettings, base: Path) -> Iterator[PathMessage]:
    """Yield the mistakes in `runtime.trackers` that show without importing a plug-in.

    Args:
        runtime: the section.
        base: the directory in which relative paths start.
    """
    for index, name in enumerate(runtime.trackers):
        mistake = check_name(name, "tracker", TRACKERS, base)
        yield from messages_at(("runtime", "trackers", index), mistake)


def check_lr_schedule(sections: Sections) -> Iterator[PathMessage]:
    """Yield (path, message) for every setting that a schedule of learning rates contradicts.

    A learning rate that is a part of a theorem stays as it is.

    Args:
        sections: the valid sections.
    """
    local, privacy, federation = sections.local, sections.privacy, sections.federation
    if local is None or local.lr_schedule is None:
        return
    if privacy is not None and privacy.trust.name != "local" and privacy.release_kind.draws_lots:
        yield (
            _LR_SCHEDULE,
            f"trust: {privacy.trust.name} plans the grid of all sums for one learning rate; remove "
            "lr_schedule, or use trust: local",
        )
    if federation is None:
        return
    for number in (1, federation.rounds):
        rate = local.learning_rate(number)
        if rate <= 0.0:
            yield (
                _LR_SCHEDULE,
                f"the learning rate of round {number} is {rate:g}, and that round would teach "
                "nothing at full cost; end the schedule later, or set a larger eta_min or gamma",
            )
            return


_COMPARISON_KEYS = {"base", "variants"}
_EXPERIMENT_KEYS = {"data", "model", "federation", "local"}
_Section = TypeVar("_Section", bound=BaseModel)


@dataclass(frozen=True)
class LoadedExperiment:
    """A checked experiment and its source.

    Attributes:
        experiment: the settings, overrides applied.
        path: the file; None for a mapping.
        base: the directory in which relative paths start.
    """

    experiment: Experiment
    path: Path | None
    base: Path


def load_experiment(
    source: str | Path | Mapping[str, object],
    overrides: Overrides = (),
    *,
    base: str | Path | None = None,
) -> LoadedExperiment:
    """Return the checked experiment of a YAML file or a mapping.

    Plug-ins and data files are checked by name only: nothing is imported or trained. Public tables
    of `federation.participation` are read.

    Args:
        source: the path of the file, or its content as a mapping.
        overrides: `["federation.rounds=5"]` or `{"federation.rounds": 5}`, set in order.
        base: the directory in which relative paths start; None: the file's directory, or the
            current one for a mapping.

    Raises:
        ExperimentError: with every mistake of the file and the overrides.
    """
    problems: list[Problem] = []
    path = None if isinstance(source, Mapping) else Path(source)
    parsed = parse_overrides(overrides, problems)  # first: reported even if the file cannot be read
    read = _with_privacy_off(_read(source, problems))
    _refuse_comparison(read, path, problems)
    tree = _with_privacy_off(apply_overrides(read, parsed, Experiment, problems))
    directory = Path(base) if base is not None else path.parent if path else Path()
    experiment = _check(tree, directory.absolute(), problems)
    return LoadedExperiment(experiment, path, directory.absolute())


def read_yaml(path: str | Path, problems: list[Problem]) -> Node:
    """Return the located tree of a YAML file whose top level is a mapping.

    Args:
        path: the file.
        problems: receives mistakes that leave the rest of the file readable.

    Raises:
        ExperimentError: the file cannot be read or is no mapping.
    """
    file = Location(str(path))
    try:
        with Path(path).open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ExperimentError([*problems, file.problem((), "no such file")]) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot be read: {reason}"
        raise ExperimentError([*problems, file.problem((), message)]) from error
    if len(content) > MAX_FILE_BYTES:
        message = f"is larger than {MAX_FILE_BYTES >> 20} MiB, so it is no file of settings"
        raise ExperimentError([*problems, file.problem((), message)])
    tree = parse_yaml(content, file.source, problems)
    if tree.value is None and not tree.broken:
        start = Location(file.source, 1, 1)
        raise ExperimentError([*problems, start.problem((), "the file is empty")])
    if not isinstance(tree.value, dict):
        message = f"must be a mapping of sections, got {value_text(to_python(tree))}"
        new = [] if tree.broken else [tree.location.problem((), message)]
        raise ExperimentError([*problems, *new])
    return tree


def with_num_clients(loaded: LoadedExperiment, number: int) -> LoadedExperiment:
    """Return an experiment whose number of clients is known; the same one if it was written.

    Args:
        loaded: the experiment.
        number: number of clients that the data have.

    Raises:
        ExperimentError: a key contradicts the number, such as `clients_per_round`.
    """
    experiment, data = loaded.experiment, loaded.experiment.data
    if data.partition.num_clients is not None:
        return loaded
    partition = data.partition.model_copy(update={"num_clients": number})
    data = data.model_copy(update={"partition": partition})
    experiment = experiment.model_copy(update={"data": data})
    names = {field.name for field in fields(Sections)} & set(Experiment.model_fields)
    sections = Sections(
        **{name: getattr(experiment, name) for name in names - {"faults"}},
        faults=tuple(experiment.faults),
        unit=None if experiment.privacy is None else experiment.privacy.unit,
    )
    source = Location("" if loaded.path is None else str(loaded.path))
    found = check_rules(sections, loaded.base)
    if problems := [source.problem(path, message) for path, message in found]:
        raise ExperimentError(problems)
    return replace(loaded, experiment=experiment)


def _read(source: str | Path | Mapping[str, object], problems: list[Problem]) -> Node:
    if isinstance(source, Mapping):
        return from_python(source, Location(""), problems)
    return read_yaml(source, problems)


def _with_privacy_off(tree: Node) -> Node:
    """Return the tree with `privacy: null` where it says `privacy: off`."""
    entry = tree.value.get("privacy") if isinstance(tree.value, dict) else None
    if entry is None or not isinstance(tree.value, dict) or not _is_off(entry.node.value):
        return tree
    off = replace(entry, node=replace(entry.node, value=None))
    return replace(tree, value={**tree.value, "privacy": off})


def _is_off(value: object) -> bool:
    return value is False or (isinstance(value, str) and value.casefold() in ("off", "none"))


def _refuse_comparison(tree: Node, path: Path | None, problems: list[Problem]) -> None:
    """Refuse a comparison file, whose keys are all others than those of an experiment.

    Raises:
        ExperimentError: it is a comparison.
    """
    if path is None or not isinstance(tree.value, dict):
        return
    keys = {*tree.value}
    if keys & _COMPARISON_KEYS and not keys & _EXPERIMENT_KEYS:
        first = next(iter(tree.value.values())).key
        message = f"this is a comparison: fedsim compare {shlex.quote(str(path))}"
        raise ExperimentError([*problems, first.problem((), message)])


def read_settings(path: Path) -> Experiment:
    """Return the settings in the `experiment.yaml` of a run.

    Files and plug-ins that they name are not looked at: they may be gone, or anything.

    Raises:
        ExperimentError: the file is not what a run writes.
    """
    problems: list[Problem] = []
    experiment, _ = _settings(read_yaml(path, problems), problems)
    if problems or experiment is None:
        raise ExperimentError(problems)
    return experiment


def _settings(tree: Node, problems: list[Problem]) -> tuple[Experiment | None, set[object]]:
    """Return the experiment, if its sections are valid, and the sections with mistakes."""
    raw = to_python(tree)
    failed: set[object] = set()
    experiment: Experiment | None = None
    try:
        experiment = Experiment.model_validate(raw)
    except ValidationError as error:
        failed = {details["loc"][0] for details in error.errors() if details["loc"]}
        problems += _locate_messages(tree, validation_messages(error, raw))
    problems += _locate_messages(tree, _check_privacy_is_written(tree))
    return experiment, failed


def _check(tree: Node, base: Path, problems: list[Problem]) -> Experiment:
    """Return the experiment; raise if there are problems, the given ones included."""
    experiment, failed = _settings(tree, problems)
    sections = _valid_sections(to_python(tree), failed)
    federation = sections.federation
    if federation is not None:
        read = read_public_tables(federation, base)
        problems += _locate_messages(tree, read.mistakes)
        federation = read.federation
        sections = replace(sections, federation=federation)
    problems += _locate_messages(tree, check_rules(sections, base))
    if problems or experiment is None:
        raise ExperimentError(problems)
    return experiment.model_copy(update={"federation": federation})


def _locate_messages(tree: Node, messages: Iterable[PathMessage]) -> list[Problem]:
    return [
        locate(tree, path).problem(path, message)
        for path, message in messages
        if not is_broken(tree, path)
    ]


def _check_privacy_is_written(tree: Node) -> Iterator[PathMessage]:
    """Yield a message if the file ends after the key `privacy`, which YAML reads as null."""
    entry = tree.value.get("privacy") if isinstance(tree.value, dict) else None
    if entry is not None and entry.node.empty:
        yield ("privacy",), f"no value; {field_purpose(Experiment.model_fields['privacy'])}"


def _faults(raw: object, failed: set[object]) -> tuple[FaultSettings, ...]:
    given = raw.get("faults") if isinstance(raw, dict) else None
    if given is None or "faults" in failed:
        return ()
    return tuple(FaultSettings.model_validate(one) for one in given)


def _personalization(raw: object, failed: set[object]) -> PersonalizationSettings | None:
    given = raw.get("personalization") if isinstance(raw, dict) else None
    if given is None or "personalization" in failed:
        return None
    return TypeAdapter(PersonalizationSettings).validate_python(given)


def _written_unit(raw: object) -> object:
    privacy = raw.get("privacy") if isinstance(raw, dict) else None
    return privacy.get("unit") if isinstance(privacy, dict) else None


def _valid_sections(raw: object, failed: set[object]) -> Sections:
    def section(name: str, kind: type[_Section]) -> _Section | None:
        given = raw.get(name) if isinstance(raw, dict) else None
        return None if given is None or name in failed else kind.model_validate(given)

    return Sections(
        data=section("data", DataSettings),
        model=section("model", ModelSettings),
        federation=section("federation", FederationSettings),
        privacy=section("privacy", PrivacySettings),
        local=section("local", LocalSettings),
        secure_aggregation=section("secure_aggregation", SecureAggregationSettings),
        evaluation=section("evaluation", EvaluationSettings),
        personalization=_personalization(raw, failed),
        runtime=section("runtime", RuntimeSettings),
        faults=_faults(raw, failed),
        task="pate" if isinstance(raw, dict) and raw.get("task") == "pate" else "federated",
        pate=section("pate", PateSettings),
        unit=_written_unit(raw),
        mistaken=frozenset(failed),
    )
