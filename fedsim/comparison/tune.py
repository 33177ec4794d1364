"""Tuning before a comparison (`tune:`): finds the best values of a few keys for every variant.

The values to try are run as a separate comparison in the folder `tuning/`. Its seeds differ
from those of the comparison that follows.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedsim.comparison.differences import Baseline
from fedsim.comparison.load import LoadedComparison, LoadedVariant, load_comparison, with_seeds
from fedsim.comparison.results import ComparisonError, Results
from fedsim.comparison.runs_cost import best_variant
from fedsim.comparison.settings import TuneSettings
from fedsim.comparison.variants import axis_labels, value_label
from fedsim.core.metrics import metric_name
from fedsim.experiment import ExperimentError
from fedsim.experiment.errors import value_text
from fedsim.experiment.overrides import COMMAND_LINE
from fedsim.experiment.tree import from_python

FACTORS = (1 / 16, 1 / 4, 1, 4, 16)
"""Factors of a variant's own value that are tried where `tune:` gives no values."""


@dataclass(frozen=True)
class Candidates:
    """The candidates for tuning: copies of each variant with other values of the tuned keys.

    Attributes:
        comparison: a comparison in which each candidate is a variant, with the seeds to tune on.
        values: values of the tuned keys, `{variant: {candidate: {key: value}}}`.
    """

    comparison: LoadedComparison
    values: Mapping[str, Mapping[str, Mapping[str, object]]]


def load_candidates(comparison: LoadedComparison, tune: TuneSettings) -> Candidates:
    """Load the candidates of every variant: all combinations of the values to try.

    A variant is tuned only over the keys that it has; for example, a variant without privacy is not
    tuned over any key of `privacy`.

    Args:
        comparison: the comparison to tune.
        tune: the section `tune` of the comparison file.

    Raises:
        ExperimentError: a key or a value does not fit a variant; the error lists all.
    """
    values = {variant.name: _candidates(variant, tune) for variant in comparison.variants}
    variants = {
        candidate: {
            **{key: value for key, value in variant.changes.items() if key not in chosen},
            **chosen,
        }
        for variant in comparison.variants
        for candidate, chosen in values[variant.name].items()
    }
    first = {name: next(iter(candidates)) for name, candidates in values.items()}
    loaded = load_comparison(
        {
            "name": f"{comparison.name}-tuning"[-100:].lstrip(".-_"),
            "base": comparison.written_base,
            "seeds": _other_seeds(comparison.seeds, tune.seeds),
            "baseline": _renamed(comparison.baseline, first),
            "metric": comparison.settings.metric,
            "variants": variants,
        }
    )
    return Candidates(loaded, values)


def tuned_comparison(
    comparison: LoadedComparison, candidates: Candidates, results: Results
) -> tuple[LoadedComparison, dict[str, str]]:
    """Return the comparison with tuned variants, and each variant's best values as text, by name.

    Args:
        comparison: the comparison to tune.
        candidates: the candidates of all variants, as `load_candidates` returns them.
        results: the results of the candidates.

    Raises:
        ComparisonError: no candidate of a variant has the metric for every seed.
    """
    variants, texts = [], {}
    for variant in comparison.variants:
        values = candidates.values[variant.name]
        runs = [result for result in results.variants if result.name in values]
        best = best_variant(runs, results.metric)
        if best is None:
            raise ComparisonError(
                f"tune: no candidate of {variant.name!r} has a {metric_name(results.metric)} for "
                f"every seed, of {', '.join(values)}; try other values"
            )
        chosen = values[best.name]
        loaded = next(v for v in candidates.comparison.variants if v.name == best.name)
        experiments = with_seeds(loaded.experiments[0], comparison.seeds)
        variants.append(replace(variant, changes=loaded.changes, experiments=experiments))
        texts[variant.name] = _chosen_text(chosen, list(values.values()))
    return replace(comparison, variants=tuple(variants)), texts


def _candidates(variant: LoadedVariant, tune: TuneSettings) -> dict[str, dict[str, object]]:
    """Return the values of the tuned keys by the name of the candidate."""
    known = {
        key: values
        for key, values in tune.keys.items()
        if key in variant.settings or variant.settings.get(key.partition(".")[0], "") is not None
    }
    labels = axis_labels([tuple(key.split(".")) for key in known])
    axes = [
        [
            (f"{label}={value_label(number, from_python(value, COMMAND_LINE, []))}", key, value)
            for number, value in enumerate(values or _around(variant, key))
        ]
        for label, (key, values) in zip(labels, known.items(), strict=True)
    ]
    return {
        "-".join([variant.name, *(text for text, _, _ in point)]): {
            key: value for _, key, value in point
        }
        for point in itertools.product(*axes)
    }


def _around(variant: LoadedVariant, key: str) -> list[object]:
    """Return values around a variant's own value of a key, which must be a positive number.

    Raises:
        ExperimentError: the variant has no such number.
    """
    value = variant.settings.get(key)
    if not isinstance(value, float) or value <= 0.0:
        given = value_text(value) if key in variant.settings else "no value"
        message = (
            "values are needed: without them only positive decimal numbers are tried, and variant "
            f"{variant.name!r} has {given}; write {key}=VALUE,VALUE"
        )
        raise ExperimentError([COMMAND_LINE.problem(("tune", key), message)])
    return [float(f"{value * factor:.3g}") for factor in FACTORS]


def _other_seeds(seeds: Sequence[int], count: int) -> list[int]:
    """Return the smallest numbers that are no compared seeds."""
    return list(itertools.islice((n for n in itertools.count() if n not in seeds), count))


def _renamed(baseline: Baseline, first: Mapping[str, str]) -> Baseline:
    if isinstance(baseline, str):
        return first[baseline]
    return {unit: first[name] for unit, name in baseline.items()}


def _chosen_text(chosen: Mapping[str, object], candidates: Sequence[Mapping[str, object]]) -> str:
    """Return the chosen values as text, and say where a value is the first or last of several."""
    texts = []
    for key, value in chosen.items():
        tried = list(dict.fromkeys(candidate[key] for candidate in candidates))
        numbers = [number for number in tried if isinstance(number, int | float)]
        edge = ""
        if len(numbers) == len(tried) > 1 and value in (min(numbers), max(numbers)):
            edge = f" (the {'smallest' if value == min(numbers) else 'largest'} tried)"
        texts.append(f"{key.rpartition('.')[2]} {value_text(value)}{edge}")
    return ", ".join(texts) or "nothing to tune"
