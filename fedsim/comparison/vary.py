"""Values of keys to compare (`--vary KEY=VALUE,...`) or to try before a comparison (`tune:`).

Each combination of varied values is a variant of a comparison file, which is loaded, run and
written like any other. Candidates of tuning are a comparison of their own in the folder `tuning/`,
with other seeds than the comparison that follows.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.comparison.differences import setting_text
from fedsim.comparison.load import BASE, LoadedComparison, LoadedVariant, load_comparison
from fedsim.comparison.results import ComparisonError, Results
from fedsim.comparison.runs_cost import best_variant
from fedsim.comparison.settings import TuneSettings
from fedsim.comparison.variants import Point, axis_labels, changes_of, points, value_label
from fedsim.core.metrics import metric_name
from fedsim.experiment import ExperimentError, Problem
from fedsim.experiment.errors import value_text
from fedsim.experiment.load import read_yaml
from fedsim.experiment.overrides import COMMAND_LINE, Override, Overrides, parse_overrides
from fedsim.experiment.yaml_loader import Location, Node, from_python, to_python

MAX_VARIED = 100
DEFAULT_SEEDS = 5

_MAX_NAME_CHARACTERS = 100
_PRIVACY = ("privacy",)
# Either of the two sets the noise: a value of one replaces the other, and null is no privacy.
_NOISE_KEYS = (("privacy", "target_epsilon"), ("privacy", "noise_multiplier"))

# Factors of a variant's own value that are tried where `tune:` gives no values.
FACTORS = (1 / 16, 1 / 4, 1, 4, 16)

Vary = Mapping[str, Sequence[object]]


def parse_vary(texts: Sequence[str], *, option: str = "--vary") -> dict[str, list[object]]:
    """Parse texts `key.path=value,value` into `{"key.path": [value, ...]}`; values are YAML."""
    problems: list[Problem] = []
    varied: dict[str, list[object]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        if not values.strip():
            message = f"{option} {text!r} has no values; write {option} key.path=value,value"
            problems.append(COMMAND_LINE.problem((), message))
        elif key.strip() in varied:
            problems.append(COMMAND_LINE.problem((key.strip(),), f"is given twice by {option}"))
        else:
            for override in parse_overrides([f"{key}=[{values}]"], problems):
                parsed = to_python(override.node)
                varied[key.strip()] = parsed if isinstance(parsed, list) else [parsed]
    if problems:
        raise ExperimentError(problems)
    return varied


def parse_tune(texts: Sequence[str]) -> dict[str, list[object] | None]:
    """Parse texts `key.path=value,value` as `parse_vary`; a text without values gives None."""
    without = {text.strip(): None for text in texts if "=" not in text}
    return {**without, **parse_vary([text for text in texts if "=" in text], option="--tune")}


def load_varied(
    source: str | Path | Mapping[str, Any],
    vary: Vary,
    *,
    overrides: Overrides = (),
    one_at_a_time: bool = False,
    changes: Mapping[str, object],
) -> LoadedComparison:
    """Load a comparison whose variants are one experiment with varied values.

    None as value of `privacy.target_epsilon` or `privacy.noise_multiplier` means no privacy. With
    `one_at_a_time`, a variant changes only one key to one value, and the unchanged file is the
    first variant, `base`. `changes` are further keys of the comparison file, such as `seeds`.
    """
    problems: list[Problem] = []
    if isinstance(source, Mapping):
        path, base = Path(BASE), from_python(source, Location(BASE), problems)
    else:
        path, base = Path(source), read_yaml(source, problems)
    fixed = parse_overrides(overrides, problems)
    axes = _axes(vary, problems)
    if {"base", "variants"} <= base.entries.keys():
        message = "this is a comparison, which has variants of its own; leave --vary out"
        problems.append(base.location.problem((), message))
    total = 1 + sum(map(len, axes)) if one_at_a_time else math.prod(map(len, axes))
    if total > MAX_VARIED:
        advice = "vary fewer values, or write a comparison file with a grid"
        message = f"--vary gives {total:,} variants, at most {MAX_VARIED} are allowed: {advice}"
        problems.append(COMMAND_LINE.problem((), message))
    if problems:
        raise ExperimentError(problems)
    variants: dict[str, dict[str, object]] = {}  # equal ones appear once
    for point in map(_without_privacy, points(axes, one_at_a_time=one_at_a_time)):
        new = [other for value in point.values() for other in _with_other_noise(value, base, fixed)]
        variants.setdefault("-".join(point) or "base", changes_of(new))
    name = base.entries["name"].node.value if "name" in base.entries else None
    title = name if isinstance(name, str) else path.stem
    labels = axis_labels([axis[0].path for axis in axes])
    content = {
        "name": f"{title}-by-{'-'.join(labels)}"[:_MAX_NAME_CHARACTERS],
        "base": source if isinstance(source, Mapping) else str(path),
        "seeds": DEFAULT_SEEDS,
        "baseline": next(iter(variants), None),
        **changes,
        "variants": variants,
    }
    return load_comparison(
        content, overrides=fixed, location=COMMAND_LINE, first_is_centre=one_at_a_time
    )


def _axes(vary: Vary, problems: list[Problem]) -> list[list[Override]]:
    """Return the overrides of varied keys, one list for each key; a repeated value is a problem."""
    if all(".".join(key) in vary for key in _NOISE_KEYS):
        message = "privacy.target_epsilon and privacy.noise_multiplier exclude each other: vary one"
        problems.append(COMMAND_LINE.problem(_NOISE_KEYS[0], message))
    axes = []
    for key, values in vary.items():
        axis: list[Override] = []
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            message = f"the values to compare must be a list, got {value_text(values)}"
            problems.append(COMMAND_LINE.problem((key,), message))
        elif key == "seed":
            message = "every variant runs with every seed; use --seeds"
            problems.append(COMMAND_LINE.problem((key,), message))
        else:
            axis = [new for value in values for new in parse_overrides({key: value}, problems)]
        named: dict[str, object] = {}
        for number, override in enumerate(axis):
            value, label = to_python(override.node), value_label(number, override.node)
            if label in named:
                message = f"{value_text(value)} is given twice"
                if (former := named[label]) != value:
                    both = f"{value_text(former)} and {value_text(value)} have one name in results"
                    message = f"{both}, {label!r}; leave one of them out"
                problems.append(COMMAND_LINE.problem(override.path, message))
            named.setdefault(label, value)
        if axis:  # a key with mistakes has none
            axes.append(axis)
    return axes


def _without_privacy(point: Point) -> Point:
    """Return a point where a null noise key becomes `privacy: null`, without other privacy keys."""
    without = {
        label: Override(_PRIVACY, override.node)
        for label, override in point.items()
        if override.node.value is None and override.path in (*_NOISE_KEYS, _PRIVACY)
    }
    others = {label: new for label, new in point.items() if new.path[:1] != _PRIVACY}
    return {**without, **others} if without else point


def _with_other_noise(override: Override, base: Node, fixed: Sequence[Override]) -> list[Override]:
    """Return the override, preceded by one that removes the other noise key if that is set."""
    section = base.entries.get("privacy")
    given = {(*_PRIVACY, key) for key in (section.node.entries if section else ())}
    given |= {override.path for override in fixed}
    if override.path not in _NOISE_KEYS:
        return [override]
    others = given & {*_NOISE_KEYS} - {override.path}
    return [*(Override(other, Node(None, COMMAND_LINE)) for other in others), override]


# Values of the tuned keys, `{variant: {candidate: {key: value}}}`.
TunedValues = Mapping[str, Mapping[str, Mapping[str, object]]]


def load_candidates(
    comparison: LoadedComparison, tune: TuneSettings
) -> tuple[LoadedComparison, TunedValues]:
    """Load the candidates of every variant: copies with all combinations of the values to try.

    A variant is tuned only over the keys that it has: without privacy, over none of `privacy`. In
    the loaded comparison each candidate is a variant, with the seeds to tune on.
    """
    values = {variant.name: _candidates(variant, tune) for variant in comparison.variants}
    variants = {
        candidate: {k: v for k, v in variant.changes.items() if k not in chosen} | chosen
        for variant in comparison.variants
        for candidate, chosen in values[variant.name].items()
    }
    first = {name: next(iter(candidates)) for name, candidates in values.items()}
    base = comparison.baseline
    baseline = first[base] if isinstance(base, str) else {unit: first[base[unit]] for unit in base}
    other_seeds = (seed for seed in itertools.count() if seed not in comparison.seeds)
    loaded = load_comparison(
        {
            "name": f"{comparison.name}-tuning"[-100:].lstrip(".-_"),
            "base": comparison.written_base,
            "seeds": list(itertools.islice(other_seeds, tune.seeds)),
            "baseline": baseline,
            "metric": comparison.settings.metric,
            "variants": variants,
        }
    )
    return loaded, values


def tuned_comparison(
    comparison: LoadedComparison,
    candidates: tuple[LoadedComparison, TunedValues],
    results: Results,
) -> tuple[LoadedComparison, dict[str, str]]:
    """Return the comparison with tuned variants, and each variant's best values as text."""
    loaded = {candidate.name: candidate for candidate in candidates[0].variants}
    variants, texts = [], {}
    for variant in comparison.variants:
        values = candidates[1][variant.name]
        runs = [result for result in results.variants if result.name in values]
        best = best_variant(runs, results.metric)
        if best is None:
            lacks = f"has a {metric_name(results.metric)} for every seed, of {', '.join(values)}"
            message = f"tune: no candidate of {variant.name!r} {lacks}; try other values"
            raise ComparisonError(message)
        tuned = loaded[best.name]
        variants.append(replace(variant, changes=tuned.changes, loaded=tuned.loaded))
        texts[variant.name] = _chosen_text(values[best.name], list(values.values()))
    return replace(comparison, variants=tuple(variants)), texts


def _candidates(variant: LoadedVariant, tune: TuneSettings) -> dict[str, dict[str, object]]:
    """Return the values of the tuned keys by the name of the candidate."""
    problems: list[Problem] = []
    varied = {
        key: values or _around(variant, key)
        for key, values in tune.keys.items()
        if key in variant.settings or variant.settings.get(key.partition(".")[0], "") is not None
    }
    axes = _axes(varied, problems)
    if problems:
        raise ExperimentError(problems)
    return {"-".join([variant.name, *point]): changes_of(point.values()) for point in points(axes)}


def _around(variant: LoadedVariant, key: str) -> list[object]:
    """Return values around a variant's own value of a key, which must be a positive number."""
    value = variant.settings.get(key)
    if not isinstance(value, float) or value <= 0.0:
        given = value_text(value) if key in variant.settings else "no value"
        message = (
            "values are needed: without them only positive decimal numbers are tried, and variant "
            f"{variant.name!r} has {given}; write {key}=VALUE,VALUE"
        )
        raise ExperimentError([COMMAND_LINE.problem(("tune", key), message)])
    return [float(f"{value * factor:.3g}") for factor in FACTORS]


def _chosen_text(chosen: Mapping[str, object], candidates: Sequence[Mapping[str, object]]) -> str:
    """Return the chosen values as text, and say where a value is the first or last of several."""
    texts = []
    for key, value in chosen.items():
        tried = [candidate[key] for candidate in candidates]
        numbers = [number for number in tried if isinstance(number, int | float)]
        text = setting_text(value) if isinstance(value, list) else value_text(value)
        if len(numbers) == len(tried) and min(numbers) < max(numbers):
            ends = {max(numbers): " (the largest tried)", min(numbers): " (the smallest tried)"}
            text += next((words for end, words in ends.items() if value == end), "")
        texts.append(f"{key.rpartition('.')[2]} {text}")
    return ", ".join(texts) or "nothing to tune"
