"""The numbers of a comparison as text, and notes on how to read them."""

from collections.abc import Iterator, Sequence

from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult, finite_values
from fedsim.comparison.statistics import Estimate
from fedsim.core.formatting import delta_text, duration_text, epsilon_text, metric_text
from fedsim.report.overview import metric_name

_NOTHING = "–"


def metric_words(metric: str) -> str:
    """Return a metric's name for people: `test_accuracy` is test accuracy."""
    if metric.startswith("personal_"):
        return f"personal {metric_name(metric)} on public data"
    return f"test {metric_name(metric)}"


def guarantee_text(variant: VariantResult) -> str:
    """Return the guarantee of each run of a variant."""
    if not variant.is_private:
        return "none"
    if variant.delta is None:
        return _NOTHING
    sign = "≤" if variant.epsilon is not None else "="
    return f"ε {sign} {epsilon_text(variant.epsilon)}"


def observer_text(variant: VariantResult) -> str:
    """Return the observer of a variant's ε, and ε against the server that broke a secure sum."""
    if variant.observer is None:
        return _NOTHING
    if "server" not in variant.certificates or variant.observer == "server":
        return variant.observer
    return f"{variant.observer} (server: ε ≤ {epsilon_text(variant.certificates['server'])})"


def interval_text(metric: str, estimate: Estimate) -> str:
    """Return a mean and half of its interval; a single seed has no interval."""
    return metric_text(metric, estimate.mean) + _half(metric, estimate)


def difference_text(metric: str, estimate: Estimate) -> str:
    """Return a difference with half of its interval; of accuracies in percentage points."""
    accuracy = metric.endswith("accuracy")
    value = 100 * estimate.mean if accuracy else estimate.mean
    text = f"{value:+.1f}" if accuracy else f"{value:+.3g}"
    return text.replace("-", "−") + _half(metric, estimate) + (" pp" if accuracy else "")


def p_text(p: float | None) -> str:
    """Return a p value with two digits, at most four decimals; very small ones as a bound."""
    if p is None:
        return _NOTHING
    return "<0.001" if p < 1e-3 else f"{float(f'{p:.2g}'):.4f}".rstrip("0").rstrip(".")


def seconds_text(seconds: Estimate | None) -> str:
    """Return the mean time of a run."""
    return _NOTHING if seconds is None else duration_text(seconds.mean)


def common_prefix(names: Sequence[str]) -> str:
    """Return the characters that all names begin with."""
    first, last = min(names), max(names)
    same = [a == b for a, b in zip(first, last, strict=False)]
    return first[: [*same, False].index(False)]


def common_words(names: Sequence[str]) -> str:
    """Return the setting that all names begin with, such as `target_epsilon=`; else ""."""
    prefix = common_prefix(names) if len(names) > 1 else ""
    return prefix[: prefix.rfind("=") + 1]


def _half(metric: str, estimate: Estimate) -> str:
    """Return half of the symmetric t interval: ` ± 1.2`."""
    if estimate.high is None:
        return ""
    half = estimate.high - estimate.mean
    return f" ± {100 * half:.1f}" if metric.endswith("accuracy") else f" ± {half:.2g}"


def notes_of(results: Results) -> list[str]:
    """Return one sentence or two for each thing that a reader must know."""
    return [
        *results.remarks,
        *_on_guarantees(results),
        *_on_seeds(results),
        *_on_tests(results),
        *_on_missing_seeds(results),
    ]


def seeds_text(results: Results) -> str:
    """Return the number of seeds of a variant: `5 seeds`, `1 seed`, `1 to 5 seeds`."""
    counts = sorted({len(one.outcomes) for one in results.variants})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} {'seed' if counts[-1] == 1 else 'seeds'}"


def _on_guarantees(results: Results) -> Iterator[str]:
    if len(results.groups) > 1:
        yield (
            "An ε of unit example protects one example, an ε of unit client everything that one "
            "client has. The two cannot be compared, so no difference has variants of both units."
        )
    deltas = sorted({one.delta for one in results.variants if one.delta is not None})
    if len(deltas) > 1:
        shown = ", ".join(delta_text(delta) for delta in deltas)
        yield (
            f"The variants have different δ ({shown}): of two equal ε, the one with the smaller δ "
            "is the stronger guarantee."
        )
    adjacencies = sorted({one.adjacency for one in results.outcomes if one.adjacency})
    if len(adjacencies) > 1:
        yield (
            f"The variants have different adjacencies ({', '.join(adjacencies)}): their ε protect "
            "against different changes of the data, and cannot be ranked."
        )


def _on_seeds(results: Results) -> Iterator[str]:
    most = max(len(one.outcomes) for one in results.variants)
    if most == 1:
        yield "There is one seed, so there are no intervals and no tests: run more seeds."
        return
    yield (
        f"± is half a 95 % t interval over {seeds_text(results)}. A seed sets data split, "
        "partition, initial model, participants, lots and noise, so an interval covers the "
        "variation of all of these, but not that of another dataset."
    )
    pairs = {one.name: len(one.difference.seeds) for one in results.variants if one.difference}
    finished = {one.name: len(one.finished_runs) for one in results.variants}
    compared = [pair for group in results.groups for pair in group.pairs if pair[0] in pairs]
    most_common = {name: max(finished[name], finished[base]) for name, base in compared}
    fewer = [
        f"{name} {pairs[name]} of {most}"
        for name, most in most_common.items()
        if pairs[name] < most
    ]
    if fewer:
        yield (
            "A difference is over the seeds that finished in the variant and in the baseline: "
            f"{', '.join(fewer)}."
        )
    largest = max(pairs.values(), default=0)
    floor = 2.0 ** (1 - largest)
    if largest > 1 and floor > 0.05:
        yield (
            f"With {largest} seeds, the sign-flip test cannot give a p value below {floor:.3g}, "
            "however large the difference."
        )


def _on_tests(results: Results) -> Iterator[str]:
    tested = sum(
        variant.difference is not None and variant.difference.holm_p is not None
        for variant in results.variants
    )
    if tested > 1:
        yield (
            f"p values are of paired t tests, adjusted for {tested} comparisons with the baseline "
            "(Holm)."
        )


def _on_missing_seeds(results: Results) -> Iterator[str]:
    for variant in results.variants:
        values = finite_values(variant.outcomes, results.metric)
        missing = [one for one in variant.outcomes if one.seed not in values]
        if missing:
            shown = ", ".join(f"{one.seed} ({_why(one)})" for one in missing)
            yield (
                f"{variant.name}: left out seed {shown}, which may bias the mean: the remaining "
                "seeds may be the better ones."
            )


def _why(outcome: RunOutcome) -> str:
    return "its value is not finite" if outcome.is_finished else outcome.status
