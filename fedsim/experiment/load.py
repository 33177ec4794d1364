"""Loading of an experiment file: check each section, then the rules between sections.

All mistakes are reported together. A rule runs if all sections that it reads are valid.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from fedsim.core.limits import MAX_FILE_BYTES
from fedsim.core.settings import Settings
from fedsim.experiment.errors import ExperimentError, Problems, value_text
from fedsim.experiment.messages import Mistakes, PathMessage, validation_messages
from fedsim.experiment.overrides import Overrides, apply_overrides, parse_overrides
from fedsim.experiment.public_tables import named_table, read_public_tables
from fedsim.experiment.rules import Sections, algorithm, clients, data, mechanisms, trust
from fedsim.experiment.schema import Experiment, ExperimentWithClients
from fedsim.experiment.shapes import field_purpose
from fedsim.experiment.yaml_loader import Location, Node, from_python, parse_yaml, to_python
from fedsim.server.settings import FederationSettings

# The rules: each function `check_...` of the modules, in the order of their messages. A rule's
# parameters name the attributes of `Sections` that it needs; it runs once all of them are known.
# `sections` may lack some.
RULES: tuple[Callable[..., Mistakes], ...] = tuple(
    rule
    for module in (data, algorithm, clients, mechanisms, trust)
    for name, rule in vars(module).items()
    if name.startswith("check_") and rule.__module__ == module.__name__
)


def broken_rules(sections: Sections, *, checked: Sections | None = None) -> Mistakes:
    """Yield (key path, message) for broken rules, except those that already ran for `checked`."""
    for rule in RULES:
        needs = _needs(rule, sections)
        if needs is not None and (checked is None or _needs(rule, checked) is None):
            yield from rule(**needs)


def _needs(rule: Callable[..., object], sections: Sections) -> Mapping[str, object] | None:
    """Return the arguments of a rule, or None if one of them is not known."""
    names = signature(rule).parameters
    known = {name: sections if name == "sections" else getattr(sections, name) for name in names}
    return None if None in known.values() else known


_COMPARISON_KEYS = {"base", "variants"}
_EXPERIMENT_KEYS = {"data", "model", "federation", "local"}
_Settings = TypeVar("_Settings", bound=Settings)


@dataclass(frozen=True)
class LoadedExperiment:
    """A checked experiment, with the file that it was read from."""

    experiment: Experiment  # `ExperimentWithClients` if the file gives the number of clients
    path: Path | None  # None for a mapping
    base: Path  # the directory that relative paths refer to
    table: str | None = None  # the file that `federation.participation` names and that was read


def load_experiment(
    source: str | Path | Mapping[str, object] | Node,
    overrides: Overrides = (),
    *,
    base: str | Path | None = None,
) -> LoadedExperiment:
    """Return the checked experiment of a file, or of a mapping, which may have Python objects.

    For plug-ins and data files, only the names are checked: nothing is imported or trained. A csv
    file that `federation.participation` names is read. Overrides apply in their order. Relative
    paths refer to `base`; None means the file's directory, or the current directory for a mapping.

    Raises:
        ExperimentError: the file or an override has mistakes; the error lists all of them.
    """
    problems: Problems = []
    path = Path(source) if isinstance(source, str | Path) else None
    # First: mistakes in overrides are reported even if the file cannot be read.
    parsed = parse_overrides(overrides, problems)
    if isinstance(source, Mapping):
        source = from_python(source, Location(""), problems)
    tree = _with_privacy_off(source if isinstance(source, Node) else read_yaml(source, problems))
    keys = tree.entries.keys()  # a comparison shares no key with an experiment
    if path is not None and keys & _COMPARISON_KEYS and not keys & _EXPERIMENT_KEYS:
        message = f"this is a comparison: fedsim compare {shlex.quote(str(path))}"
        raise next(iter(tree.entries.values())).key.error(problems, message)
    tree = _with_privacy_off(apply_overrides(tree, parsed, Experiment, problems))
    directory = Path(base) if base is not None else path.parent if path else Path()
    experiment, table = _check(tree, directory.absolute(), problems)
    return LoadedExperiment(experiment, path, directory.absolute(), table)


def read_yaml(path: str | Path, problems: Problems) -> Node:
    """Return the parsed YAML of a file, in which each value has its line and column.

    Mistakes are appended to `problems`; those that stop the reading are an ExperimentError: the
    file cannot be read, or its top level is not a mapping.
    """
    file = Location(str(path))
    try:
        with Path(path).open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise file.error(problems, "no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise file.error(problems, f"cannot be read: {reason}") from error
    if len(content) > MAX_FILE_BYTES:
        message = f"is larger than {MAX_FILE_BYTES >> 20} MiB, so it is no file of settings"
        raise file.error(problems, message)
    tree = parse_yaml(content, file.source, problems)
    if tree.value is None and not tree.broken:
        raise Location(file.source, 1, 1).error(problems, "the file is empty")
    if not isinstance(tree.value, dict):
        message = f"must be a mapping of sections, got {value_text(to_python(tree))}"
        new = [] if tree.broken else [tree.location.problem((), message)]
        raise ExperimentError([*problems, *new])
    return tree


def with_clients(loaded: LoadedExperiment, number: int) -> ExperimentWithClients:
    """Return the settings, completed by the number of clients that the loaded data have.

    If the file already gives the number, the settings are returned unchanged. Otherwise the rules
    that need it are checked: a key such as `clients_per_round` may contradict it (ExperimentError).
    """
    experiment = loaded.experiment
    if isinstance(experiment, ExperimentWithClients):
        return experiment
    known = ExperimentWithClients.of(experiment, number)
    before, after = (Sections.of(dict(sections), loaded.base) for sections in (experiment, known))
    source = Location("" if loaded.path is None else str(loaded.path))
    if problems := [source.problem(*each) for each in broken_rules(after, checked=before)]:
        raise ExperimentError(problems)
    return known


def _with_privacy_off(tree: Node) -> Node:
    """Return the tree with `privacy: off` replaced by `privacy: null`."""
    entry = tree.entries.get("privacy")
    value = None if entry is None else entry.node.value
    is_word = isinstance(value, str) and value.casefold() in ("off", "none")
    if entry is None or not (value is False or is_word):
        return tree
    off = replace(entry, node=replace(entry.node, value=None))
    return replace(tree, value={**tree.entries, "privacy": off})


def read_settings(path: Path) -> ExperimentWithClients:
    """Return the settings of a run from its `experiment.yaml`, or raise an ExperimentError.

    Files and plug-ins that the settings name are not checked: they may have changed or be gone.
    """
    return read_checked(path, ExperimentWithClients)


def read_checked(
    path: str | Path,
    model: type[_Settings],
    rules: Callable[[_Settings], Iterable[PathMessage]] = lambda settings: (),
) -> _Settings:
    """Return the settings in a YAML file of another kind, or raise all mistakes (ExperimentError).

    The rules yield (key path, message) for keys that do not fit together.
    """
    problems: Problems = []
    tree = read_yaml(path, problems)
    settings = validated(tree, model, problems)
    if settings is not None:
        problems += located(tree, rules(settings))
    if problems or settings is None:
        raise ExperimentError(problems)
    return settings


def validated(
    tree: Node,
    model: type[_Settings],
    problems: Problems,
    sections: dict[str, object] | None = None,
) -> _Settings | None:
    """Return the settings in a parsed file, or None if the file has mistakes.

    Mistakes are appended to `problems`. An `Experiment` adds each valid section to `sections`.
    """
    raw = to_python(tree)
    try:
        return model.model_validate(raw, context=sections)
    except ValidationError as error:
        problems += located(tree, validation_messages(error, raw, model))
        return None


def _check(tree: Node, base: Path, problems: Problems) -> tuple[Experiment, str | None]:
    """Return the experiment and the path of its public table, or raise if there are mistakes."""
    sections: dict[str, object] = {  # by name, those that are valid
        name: field.default
        for name, field in Experiment.model_fields.items()
        if name not in tree.entries and not field.is_required()
    }
    experiment = validated(tree, Experiment, problems, sections)
    privacy = tree.entries.get("privacy")
    if privacy is not None and privacy.node.empty:  # YAML reads a key without a value as null
        purpose = field_purpose(Experiment.model_fields["privacy"])
        problems += located(tree, [(("privacy",), f"no value; {purpose}")])
    federation, table = sections.get("federation"), None
    if isinstance(federation, FederationSettings):
        table = named_table(federation.participation)
        federation, mistakes = read_public_tables(federation, base)
        problems += located(tree, mistakes)
        sections["federation"] = federation
    unit = privacy and privacy.node.entries.get("unit")  # also of a section with mistakes
    known = Sections.of(sections, base, unit=unit and unit.node.value)
    problems += located(tree, broken_rules(known))
    if problems or experiment is None:
        raise ExperimentError(problems)
    experiment = experiment.model_copy(update={"federation": federation})
    number = experiment.data.partition.num_clients
    complete = experiment if number is None else ExperimentWithClients.of(experiment, number)
    return complete, table


def located(tree: Node, messages: Iterable[PathMessage]) -> Problems:
    """Return messages as problems with their places in the file.

    A message about a value for which a problem was already reported is left out.
    """
    problems: Problems = []
    for path, message in messages:
        locations, nodes = zip(*tree.places_on(path), strict=True)
        if not any(node.broken for node in nodes):
            problems.append(locations[-1].problem(path, message))
    return problems
