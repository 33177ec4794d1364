"""Functions that load a comparison file and check the experiment of every variant and seed."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from fedsim.comparison.differences import Baseline, compared_settings, unit_problems
from fedsim.comparison.settings import (
    ComparisonSettings,
    candidate_problems,
    file_problems,
    required_problems,
)
from fedsim.comparison.variants import Variant, changes_of, expand_variants, merged
from fedsim.core.limits import MAX_COMPARED_RUNS
from fedsim.core.metrics import computed_metrics
from fedsim.experiment import Experiment, ExperimentError, LoadedExperiment, load_experiment
from fedsim.experiment.errors import Problem, any_of, did_you_mean
from fedsim.experiment.load import located, read_yaml, validated
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.overrides import COMMAND_LINE, Overrides, apply_overrides, parse_overrides
from fedsim.experiment.yaml_loader import Location, Node, from_python, to_python


@dataclass(frozen=True)
class LoadedVariant:
    """A variant of a comparison, with its checked experiment (with the seed of the base)."""

    name: str
    changes: Mapping[str, object]  # to the base, as `{"key.path": value}`
    loaded: LoadedExperiment
    arm: str | None = None  # name of the predefined baseline that it starts from

    @property
    def experiment(self) -> Experiment:
        """The settings of the experiment, with the seed of the base."""
        return self.loaded.experiment

    def with_seed(self, seed: int) -> LoadedExperiment:
        """Return the experiment with another seed; no rule reads the seed."""
        return replace(self.loaded, experiment=self.experiment.model_copy(update={"seed": seed}))

    @property
    def settings(self) -> dict[str, object]:
        """All settings except name and seed, as `{"key.path": value}`."""
        return compared_settings(self.experiment)


@dataclass(frozen=True)
class LoadedComparison:
    """A comparison file after a check of the experiments of all variants and seeds."""

    settings: ComparisonSettings
    name: str
    written_base: object  # path of the base experiment; its content if it was given as a mapping
    seeds: tuple[int, ...]  # a search has only that of the base
    variants: tuple[LoadedVariant, ...]

    @property
    def baseline(self) -> Baseline:
        """Name of the baseline variant, or by privacy unit; a search has none (ValueError)."""
        if self.settings.baseline is None:
            raise ValueError("a search has no baseline")
        return self.settings.baseline

    @property
    def candidates(self) -> tuple[LoadedVariant, ...]:
        """The variants among which a search (`select.search`) draws one at random for each run."""
        names = self.settings.select and self.settings.select.among
        return tuple(variant for variant in self.variants if not names or variant.name in names)


_NO_FILE = Location("")
BASE = "base"  # source of the mistakes in a base that is given as a mapping


def load_comparison(
    source: str | Path | Mapping[str, object],
    *,
    search: bool = False,
    changes: Mapping[str, object] = MappingProxyType({}),
    overrides: Overrides = (),
    location: Location = _NO_FILE,
    first_is_centre: bool = False,
) -> LoadedComparison:
    """Load a comparison from a YAML file or a mapping; an ExperimentError lists all mistakes.

    No plug-in is imported and no data are read. All experiments are checked before the first run.
    `changes` are new values of keys of the comparison file, such as `{"seeds": 3}`, and `overrides`
    those of the base experiment. `search` loads the file for a search (`select.search`).
    `location` is the place of mistakes in a mapping. With `first_is_centre`, other variants with
    the settings of the first one are left out.
    """
    problems: list[Problem] = []
    fixed = parse_overrides(overrides, problems)
    tree, place, given = _read(source, location, problems)
    tree = apply_overrides(tree, parse_overrides(dict(changes), problems), None, problems)
    settings = validated(tree, ComparisonSettings, problems)
    base, base_tree = (given, given) if given else _read_base(tree, place.parent, problems)
    if base_tree is not None:  # mistakes are reported later, when a variant is loaded
        fixed = merged(fixed, base_tree)
        base_tree = apply_overrides(base_tree, fixed, Experiment, [])
    if any(override.path == ("seed",) for override in fixed):
        message = "every variant runs with every seed; use --seeds"
        problems.append(COMMAND_LINE.problem(("seed",), message))
    entry, content = tree.entries.get("variants"), base_tree and to_python(base_tree)
    variants = expand_variants(entry.node.entries, content, fixed, problems) if entry else []
    if first_is_centre:
        variants = [replace(variant, origin=variants[0].name) for variant in variants]
    mistakes: list[Problem] = []
    loaded = [] if base is None else _load_variants(base, variants, mistakes)
    # Variants with the settings of the variant that they were made from.
    settings_of = {variant.name: variant.settings for variant in loaded}
    made = [(v.name, v.origin) for v in variants if v.name in settings_of and v.name != v.origin]
    repeated = {name for name, of in made if settings_of[name] == settings_of.get(of)}
    loaded = [variant for variant in loaded if variant.name not in repeated]
    if settings is not None:
        names = [variant.name for variant in variants if variant.name not in repeated]
        problems += located(tree, _rules(settings, names, search=search))
    problems += mistakes
    if problems or settings is None or base is None or not loaded:
        raise ExperimentError(problems)
    seeds = settings.seeds or (loaded[0].experiment.seed,)
    written = to_python(base) if isinstance(base, Node) else str(base.absolute())
    name = settings.name or place.stem
    comparison = LoadedComparison(settings, name, written, seeds, tuple(loaded))
    if search:
        rules = candidate_problems({v.name: v.experiment for v in comparison.candidates})
    else:
        rules = chain(_unit_rules(comparison), _metric_rules(comparison))
    problems += located(tree, rules)
    if problems:
        raise ExperimentError(problems)
    return comparison


def _read(
    source: str | Path | Mapping[str, object], location: Location, problems: list[Problem]
) -> tuple[Node, Path, Node | None]:
    """Return the content of a comparison, the path of its file, and its base if that is content.

    The directory of the path is where relative paths begin, and its stem is the default name.
    """
    given = None
    if isinstance(source, Mapping):
        place, advice = Path("comparison"), ("give vary={KEY: [VALUE, VALUE]}", "fedsim.run")
        content = source.get("base")
        if isinstance(content, Mapping):
            given, source = from_python(content, Location(BASE), problems), {**source, "base": BASE}
        tree = from_python(source, location, problems)
    else:
        place, advice = Path(source), ("add --vary KEY=VALUE,VALUE", "fedsim run")
        tree = read_yaml(source, problems)
    if "model" in tree.entries and not {"base", "variants"} & tree.entries.keys():
        what, (fix, run) = "this is an experiment, not a comparison", advice
        message = f"{what}: {fix} to compare variants of it, or run it with {run}"
        raise tree.location.error(problems, message)  # all of its keys would be unknown
    return tree, place, given


def _read_base(
    tree: Node, directory: Path, problems: list[Problem]
) -> tuple[Path, Node] | tuple[None, None]:
    """Return the path and the tree of the base experiment; None twice if it cannot be read."""
    entry = tree.entries.get("base")
    if entry is None or not isinstance(entry.node.value, str):
        return None, None  # reported already
    path = directory / entry.node.value
    try:
        if "\0" in entry.node.value or not path.is_file():
            raise entry.key.error([], f"no such file: {str(path.absolute())!r}", ("base",))
        return path, read_yaml(path, [])
    except ExperimentError as error:
        problems += error.problems
        return None, None


def _load_variants(
    base: Path | Node, variants: list[Variant], problems: list[Problem]
) -> list[LoadedVariant]:
    """Return the variants without mistakes; a problem names its variant if its place does not."""
    loaded: list[LoadedVariant] = []
    mistakes: list[tuple[Variant, Problem]] = []
    for variant in variants:
        try:
            experiment = load_experiment(base, variant.overrides)
        except ExperimentError as error:
            mistakes += [(variant, problem) for problem in error.problems]
        else:
            changes = changes_of(variant.overrides)
            loaded.append(LoadedVariant(variant.name, changes, experiment, variant.arm))
    of_base = base.location.source if isinstance(base, Node) else str(base)
    counts = Counter(problem for _, problem in mistakes)
    for variant, problem in mistakes:
        if problem.source not in (of_base, COMMAND_LINE.source):  # written in the variant
            problem = replace(problem, path=("variants", variant.origin, *problem.path))
        elif problem.source == of_base and counts[problem] < len(variants):
            problem = replace(problem, message=f"{problem.message} (in variant {variant.name!r})")
        problems.append(problem)
    return loaded


def _rules(
    settings: ComparisonSettings, names: list[str], *, search: bool
) -> Iterator[PathMessage]:
    yield from file_problems(settings) if search else required_problems(settings)
    if (baseline := settings.baseline) is not None and not search:
        single = isinstance(baseline, str)
        named = {(): baseline} if single else {(unit,): name for unit, name in baseline.items()}
        for unit, name in named.items():
            if name not in names:
                yield ("baseline", *unit), _no_such_variant(name, names)
        if not named:
            yield ("baseline",), "names no variant"
    if len(names) == 1 and not search:
        yield ("variants",), "there must be at least two variants to compare"
    seeds = len(settings.seeds or (0,))
    runs = len(names) * seeds
    if runs > MAX_COMPARED_RUNS:
        text = f"{len(names)} variants with {seeds} seeds are {runs:,} runs"
        yield ("seeds",), f"{text}; a comparison has at most {MAX_COMPARED_RUNS:,}"
    select = settings.select
    if select is None:
        return
    for index, name in enumerate(select.among or ()):
        if name not in names:
            yield ("select", "among", index), _no_such_variant(name, names)
    if select.metric.startswith("client_") and not search:
        if not settings.client_metrics:
            yield ("select", "metric"), f"{select.metric!r} needs client_metrics: true"
        if select.on == "public_test":
            yield (
                ("select", "on"),
                f"{select.metric!r} is measured on the clients' own data; write private, or "
                "public_data where they are public",
            )


def _unit_rules(comparison: LoadedComparison) -> Iterator[PathMessage]:
    """Yield why variants cannot be compared or selected within one privacy unit."""
    experiments = {variant.name: variant.experiment for variant in comparison.variants}
    units = {name: one.privacy and one.privacy.unit for name, one in experiments.items()}
    yield from unit_problems(units, comparison.baseline)
    select = comparison.settings.select
    if select is None:
        return
    if not select.among and all(one.not_private for one in experiments.values()):
        yield ("select",), "no variant has privacy; name the candidates in select.among"
    kinds = {unit for name, unit in units.items() if name in (select.among or units)} - {None}
    if len(kinds) > 1:
        yield (
            ("select",),
            "the candidates have two units of privacy, which no choice can rank; name those of one "
            "unit in select.among",
        )


def _metric_rules(comparison: LoadedComparison) -> Iterator[PathMessage]:
    """Yield (key path, message) if no run computes the test metric to compare or select by."""
    settings = comparison.settings
    select = "" if settings.select is None else settings.select.metric
    computed = [
        (v.name, computed_metrics(v.experiment.model.loss, v.experiment.metrics))
        for v in comparison.variants
    ]
    for path, metric in ((("metric",), settings.metric or ""), (("select", "metric"), select)):
        name = metric.removeprefix("test_")
        lacking = [(variant, has) for variant, has in computed if has and name not in has]
        for variant, has in lacking[:1] if metric.startswith("test_") else ():
            hint = f"it has test_{', test_'.join(has)} (evaluation.metrics adds others)"
            yield path, f"variant {variant!r} has no {metric}; {hint}"


def _no_such_variant(name: str, names: list[str]) -> str:
    hint = did_you_mean(name, names) or f"; there are {any_of(names[:10])}"
    members = [member for member in names if member.startswith(f"{name}-")]
    if members:
        hint = f"; {name!r} is a grid: name one of its variants, such as {members[0]!r}"
    return f"there is no variant {name!r}{hint}"
