"""Results of a comparison as text: numbers, notes on how to read them, and scores by class.

Noise and clipping cost classes with few examples more than others (Bagdasaryan, Poursaeed and
Shmatikov 2019), and a mean accuracy hides this cost. All numbers are means over the finished seeds.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

from rich.table import Table

from fedsim.comparison.outcomes import RunOutcome, finite_values
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import Estimate, t_interval
from fedsim.comparison.unfit import UnfitVariant
from fedsim.core.formatting import (
    delta_text,
    duration_text,
    epsilon_text,
    metric_text,
    range_text,
    some_of,
)
from fedsim.core.metrics import metric_entry, metric_name
from fedsim.report.contents import Scores, quoted, recall_text
from fedsim.report.terminal import figure_table

NOTHING = "–"


def metric_words(metric: str) -> str:
    """Return a metric's name in words: `test_accuracy` becomes "test accuracy"."""
    if metric.startswith("personal_"):
        return f"personal {metric_name(metric)} on public data"
    return f"test {metric_name(metric)}"


def guarantee_text(result: VariantResult | RunOutcome) -> str:
    """Return the privacy guarantee of a variant or a run as text, such as `ε ≤ 8`, or `none`."""
    if not result.is_private:
        return "none"
    if result.delta is None:
        return NOTHING
    sign = "≤" if result.epsilon is not None else "="
    return f"ε {sign} {epsilon_text(result.epsilon)}"


def observer_text(variant: VariantResult) -> str:
    """Return the name of the adversary against whom a variant's ε holds.

    If ε relies on secure aggregation, the ε against a server that sees single uploads is added.
    """
    if variant.observer is None:
        return NOTHING
    if "server" not in variant.certificates or variant.observer == "server":
        return variant.observer
    return f"{variant.observer} (server: ε ≤ {epsilon_text(variant.certificates['server'])})"


def interval_text(metric: str, estimate: Estimate | None) -> str:
    """Return a mean as text, with ± half of its interval's width if there are several seeds."""
    if estimate is None:
        return NOTHING
    return metric_text(metric, estimate.mean) + _half(metric, estimate)


def mean_text(results: Results, variant: VariantResult) -> str:
    """Return a variant's mean of the compared metric as text, with ± half of its interval."""
    return interval_text(results.metric, variant.metrics.get(results.metric))


def minus_text(results: Results, variant: VariantResult) -> str:
    """Return a variant's mean difference from the baseline as text, with † for an unfit variant."""
    if variant.difference is None:
        return NOTHING
    mark = "" if variant.unfit is None else " †"
    return difference_text(results.metric, variant.difference.estimate) + mark


def difference_text(metric: str, estimate: Estimate) -> str:
    """Return a mean difference ± half of its interval's width; accuracies in percentage points."""
    percent = metric_entry(metric).in_percent
    value = 100 * estimate.mean if percent else estimate.mean
    text = f"{value:+.1f}" if percent else f"{value:+.3g}"
    return text.replace("-", "−") + _half(metric, estimate) + (" pp" if percent else "")


def p_text(p: float | None) -> str:
    """Return a p value with two significant digits and at most four decimals, or `<0.001`."""
    if p is None:
        return NOTHING
    return "<0.001" if p < 1e-3 else f"{float(f'{p:.2g}'):.4f}".rstrip("0").rstrip(".")


def seconds_text(seconds: Estimate | None) -> str:
    """Return the mean time of a run as text."""
    return NOTHING if seconds is None else duration_text(seconds.mean)


def unfit_sentences(results: Results) -> dict[str, str]:
    """Return sentences that say why variants are unfit for comparisons, by the variant's name."""
    reasons = {
        variant.name: " and ".join(_reasons(variant.unfit, variant, results.metric))
        for variant in results.variants
        if variant.unfit is not None
    }
    return {name: f"{name} {text}: compare nothing with it." for name, text in reasons.items()}


def _reasons(entry: UnfitVariant, variant: VariantResult, metric: str) -> Iterator[str]:
    words, estimate = metric_words(metric), variant.metrics.get(metric)
    if entry.is_constant:
        answer = "a constant answer"
        if entry.answer is not None:
            answer = f"always answering {quoted(entry.answer)}"
        figures = ""
        if entry.constant is not None and estimate is not None:
            mean, constant = (metric_text(metric, v) for v in (estimate.mean, entry.constant))
            figures = f" ({words} {mean}, {constant} by that answer)"
        yield f"is no better than {answer}{figures}"
    if entry.has_useless_loss:
        loss, other = variant.metrics.get("test_loss"), entry.constant_loss
        if loss is None or loss.n < len(variant.finished_runs) or other is None:
            yield "has a test loss that is not finite"
        else:
            mean, constant = (metric_text("test_loss", value) for value in (loss.mean, other))
            yield f"has a test loss of {mean}, above {constant} of a constant answer"
    if entry.worse_than and not (entry.is_constant or entry.has_useless_loss):
        others, clearly = some_of(entry.worse_than, 1), "beyond the 95 % interval of the difference"
        yield f"is worse than {others}, which had less information ({clearly})"


# What to try about unfit variants that no command tunes.
OTHER_VALUES = "other values of local.optimizer.lr, or more rounds, for these variants"


def common_prefix(names: Sequence[str]) -> str:
    """Return the longest text with which all names begin."""
    same = takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
    return "".join(letter for letter, *_ in same)


def common_words(names: Sequence[str]) -> str:
    """Return the setting key with which all names begin, such as `target_epsilon=`; "" if none."""
    prefix = common_prefix(names) if len(names) > 1 else ""
    return prefix[: prefix.rfind("=") + 1]


def _half(metric: str, estimate: Estimate) -> str:
    """Return half of the symmetric t interval as text, such as ` ± 1.2`."""
    if estimate.high is None:
        return ""
    half = estimate.high - estimate.mean
    return f" ± {100 * half:.1f}" if metric_entry(metric).in_percent else f" ± {half:.2g}"


def notes_of(results: Results) -> list[str]:
    """Return the notes of a comparison: sentences with facts that a reader of the table needs."""
    return [
        *results.remarks,
        *_on_unfit(results),
        *_on_guarantees(results),
        *_on_seeds(results),
        *_on_missing_seeds(results),
    ]


def seeds_text(results: Results) -> str:
    """Return the number of seeds per variant as text: `5 seeds`, `1 seed`, `1 to 5 seeds`."""
    counts = [len(variant.outcomes) for variant in results.variants]
    return f"{range_text(counts)} {'seed' if max(counts) == 1 else 'seeds'}"


def _on_unfit(results: Results) -> Iterator[str]:
    unfit = {entry.variant for entry in results.unfit}
    if bases := [group.baseline for group in results.groups if group.baseline in unfit]:
        yield f"There are no differences from {', '.join(bases)}: a difference would say nothing."
    if any(v.difference and v.unfit for v in results.variants):
        yield "† marks a difference of a variant that the first warning names."


def _on_guarantees(results: Results) -> Iterator[str]:
    if len(results.groups) > 1:
        yield (
            "An ε of unit example protects one example, an ε of unit client everything that one "
            "client has. The two cannot be compared, so no difference has variants of both units."
        )
    deltas = sorted(results.deltas)
    if len(deltas) > 1:
        shown = ", ".join(delta_text(delta) for delta in deltas)
        yield (
            f"The variants have different δ ({shown}): of two equal ε, the one with the smaller δ "
            "is the stronger guarantee."
        )
    adjacencies = sorted({outcome.adjacency for outcome in results.outcomes if outcome.adjacency})
    if len(adjacencies) > 1:
        yield (
            f"The variants have different adjacencies ({', '.join(adjacencies)}): their ε protect "
            "against different changes of the data, and cannot be ranked."
        )


def _on_seeds(results: Results) -> Iterator[str]:
    most = max(len(variant.outcomes) for variant in results.variants)
    if most == 1:
        yield "There is one seed, so there are no intervals and no tests: run more seeds."
        return
    yield (
        f"± is half a 95 % t interval over {seeds_text(results)}. A seed sets data split, "
        "partition, initial model, participants, batches and noise, so an interval covers the "
        "variation of all of these, but not that of another dataset."
    )
    differences = {v.name: v.difference for v in results.variants if v.difference}
    pairs = {name: len(difference.seeds) for name, difference in differences.items()}
    finished = {variant.name: len(variant.finished_runs) for variant in results.variants}
    fewer = [
        f"{name} {pairs[name]} of {most}"
        for group in results.groups
        for name, base in group.pairs
        if name in pairs and pairs[name] < (most := max(finished[name], finished[base]))
    ]
    if fewer:
        both = "the seeds that finished in the variant and in the baseline"
        yield f"A difference is over {both}: {', '.join(fewer)}."
    largest = max(pairs.values(), default=0)
    floor = 2.0 ** (1 - largest)
    if largest > 1 and floor > 0.05:
        limit = f"With {largest} seeds, the sign-flip test cannot give a p value below {floor:.3g}"
        yield f"{limit}, however large the difference."
    tested = sum(difference.holm_p is not None for difference in differences.values())
    if tested > 1:
        adjusted = f"adjusted for {tested} comparisons with the baseline (Holm)"
        yield f"p values are of paired t tests, {adjusted}."


def _on_missing_seeds(results: Results) -> Iterator[str]:
    for variant in results.variants:
        values = finite_values(variant.outcomes, results.metric)
        shown = ", ".join(
            f"{run.seed} ({'its value is not finite' if run.is_finished else run.status})"
            for run in variant.outcomes
            if run.seed not in values
        )
        if shown:
            bias = "may bias the mean: the remaining seeds may be the better ones"
            yield f"{variant.name}: left out seed {shown}, which {bias}."


_MAX_ROWS = 10  # classes in a terminal: those with the largest losses
_MAX_COLUMNS = 4  # variants in a terminal
_MAX_WARNINGS = 10
_MAX_NAMED = 3  # classes of a variant that a sentence names


@dataclass(frozen=True)
class ClassRecall:
    """The mean recall of one class in each variant, and its mean number of test examples."""

    name: str
    examples: float
    recalls: tuple[float | None, ...]  # None without examples of the class


def recall_by_class(results: Results) -> list[ClassRecall]:
    """Return the recall of each class in each variant, in the order of the classes."""
    by_variant = [_recalls(variant) for variant in results.variants]
    examples: dict[str, list[int]] = {}
    for label in (c for v in results.variants for run in _scores_of(v) for c in run.classes):
        examples.setdefault(label.name, []).append(label.examples)
    return [
        ClassRecall(name, fmean(numbers), tuple(recalls.get(name) for recalls in by_variant))
        for name, numbers in examples.items()
    ]


def majority_of(variant: VariantResult) -> float | None:
    """Return the test accuracy of always predicting the largest class; None for regression."""
    shares = [one.majority.share for one in _scores_of(variant) if one.majority is not None]
    return fmean(shares) if shares else None


def baseline_note(results: Results) -> str | None:
    """Return a note on the accuracy of always predicting the largest class; None in regression."""
    shares = [share for variant in results.variants if (share := majority_of(variant)) is not None]
    if not shares:
        return None
    always = "the accuracy of always predicting the most frequent class of the test set"
    return f"Majority baseline {metric_text('accuracy', fmean(shares))}: {always}."


def score_warnings(results: Results) -> list[str]:
    """Return up to `_MAX_WARNINGS` warnings about useless models, and how many others there are."""
    warnings: list[str] = []
    for variant in results.variants:
        runs, who = _scores_of(variant), variant.name
        missed = Counter(label.name for run in runs for label in run.classes if label.is_missed)
        if len(missed) > _MAX_NAMED:
            warnings.append(f"{who} has recall 0% in {len(missed)} classes of some run.")
            missed.clear()
        for name, count in missed.items():
            none = f"{who} finds no test example of class {quoted(name)}"
            warnings.append(f"{none} in {count} of {len(runs)} runs: its recall is 0% there.")
        if (bad := sum(run.is_constant for run in runs)) and variant.unfit is None:
            of = f"{bad} of {len(runs)} runs"
            warnings.append(f"{who} is no better than a constant answer in {of}.")
    more = len(warnings) - _MAX_WARNINGS
    last = [f"{more} more such findings are in the table of classes."] if more > 0 else []
    return warnings[:_MAX_WARNINGS] + last


def scores_table(results: Results) -> Table | None:
    """Return the terminal table of recall by class: of the classes that differ most."""
    rows = recall_by_class(results)
    if len(rows) < 2:
        return None
    shown = sorted(rows, key=_by_spread)[:_MAX_ROWS]
    names = [variant.name for variant in results.variants]
    prefix = common_words(names)
    headings = ["examples", *(name.removeprefix(prefix) for name in names[:_MAX_COLUMNS])]
    title = "Recall by class, on the public test set" + (f"; {prefix}…" if prefix else "")
    table = figure_table(title, headings, texts=["class"])
    for row in rows:
        if row in shown:
            recalls = row.recalls[:_MAX_COLUMNS]
            table.add_row(row.name, f"{row.examples:,.0f}", *map(recall_text, recalls))
    notes = []
    if len(rows) > len(shown):
        notes.append(f"the {len(shown)} of {len(rows)} classes that differ most")
    if len(names) > _MAX_COLUMNS:
        notes.append(f"{_MAX_COLUMNS} of {len(names)} variants; comparison.html has all")
    table.caption = "\n".join(notes) or None
    return table


def _by_spread(row: ClassRecall) -> tuple[float, float]:
    """Return a key that sorts classes by how much variants differ, then by the lowest recall."""
    known = [value for value in row.recalls if value is not None] or [1.0]
    return min(known) - max(known), min(known)


def group_estimates(variant: VariantResult) -> dict[str, Estimate]:
    """Return the mean accuracy of each group of test examples over finished runs, by group name."""
    groups = [group for scores in _scores_of(variant) for group in scores.groups]
    names = sorted({group.name for group in groups})
    return {name: t_interval([g.accuracy for g in groups if g.name == name]) for name in names}


def group_names(results: Results) -> tuple[str | None, list[str]]:
    """Return (column that groups the test examples, names of groups); (None, []) without groups."""
    runs = [scores for variant in results.variants for scores in _scores_of(variant)]
    column = next((scores.group for scores in runs if scores.group is not None), None)
    return column, sorted({group.name for scores in runs for group in scores.groups})


def groups_table(results: Results) -> Table | None:
    """Return the terminal table of accuracy by group of test examples; None without groups."""
    column, names = group_names(results)
    if column is None:
        return None
    prefix = common_words([variant.name for variant in results.variants])
    shown = names[:_MAX_COLUMNS]
    title = f"Accuracy by {column}, on the public test set"
    table = figure_table(title, shown, texts=[prefix or "variant"])
    for variant in results.variants:
        cells = group_estimates(variant)
        texts = (interval_text("accuracy", cells.get(name)) for name in shown)
        table.add_row(variant.name.removeprefix(prefix), *texts)
    if len(names) > len(shown):
        table.caption = f"{len(shown)} of {len(names)} groups; comparison.json has all"
    return table


def scores_json(variant: VariantResult) -> dict[str, Any]:
    """Return the scores of a variant as JSON values."""
    rows = [{"class": name, "recall": recall} for name, recall in _recalls(variant).items()]
    groups = [{"group": name, **vars(mean)} for name, mean in group_estimates(variant).items()]
    return {"majority": majority_of(variant), "by_class": rows, "by_group": groups}


def _scores_of(variant: VariantResult) -> list[Scores]:
    return [run.scores for run in variant.finished_runs if run.scores is not None]


def _recalls(variant: VariantResult) -> dict[str, float | None]:
    """Return the mean recall of each class over the runs with examples of it, by class name."""
    recalls: dict[str, list[float]] = {}
    for run in _scores_of(variant):
        for label in run.classes:
            known = recalls.setdefault(label.name, [])
            if label.recall is not None:
                known.append(label.recall)
    return {name: fmean(values) if values else None for name, values in recalls.items()}
