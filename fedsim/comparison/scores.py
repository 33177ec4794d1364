"""Scores by class of the variants of a comparison: what privacy costs each class.

Noise and clipping cost classes with few examples more than others (Bagdasaryan, Poursaeed and
Shmatikov 2019), and a mean accuracy hides it. Figures are means over the finished seeds.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.text import common_words
from fedsim.core.formatting import metric_text
from fedsim.report.scores import Scores, quoted, recall_text
from fedsim.report.terminal_text import figure_table

_MAX_ROWS = 10  # classes in a terminal: those with the largest losses
_MAX_COLUMNS = 4  # variants in a terminal
_MAX_WARNINGS = 10
_MAX_NAMED = 3  # classes of a variant that a sentence names


@dataclass(frozen=True)
class ClassRecall:
    """The recall of one class in all variants.

    Attributes:
        name: name of the class or label.
        examples: mean number of its test examples.
        recalls: mean recall by variant; None without a finished run that has such examples.
    """

    name: str
    examples: float
    recalls: tuple[float | None, ...]

    @property
    def spread(self) -> float:
        """Largest difference between two variants."""
        known = [value for value in self.recalls if value is not None]
        return max(known) - min(known) if known else 0.0

    @property
    def lowest(self) -> float:
        """Lowest recall of any variant."""
        return min((value for value in self.recalls if value is not None), default=1.0)


def recall_by_class(results: Results) -> list[ClassRecall]:
    """Return the recall of each class in each variant, in the order of the classes."""
    by_variant = [_scores_of(variant) for variant in results.variants]
    every = [scores for found in by_variant for scores in found]
    names = dict.fromkeys(one.name for scores in every for one in scores.classes)
    return [
        ClassRecall(
            name=name,
            examples=fmean(
                [one.examples for scores in every for one in scores.classes if one.name == name]
            ),
            recalls=tuple(_mean_recall(found, name) for found in by_variant),
        )
        for name in names
    ]


def majority_of(variant: VariantResult) -> float | None:
    """Return the mean majority baseline of a variant's runs; None for numbers."""
    found = [one.majority for one in _scores_of(variant) if one.majority is not None]
    return fmean(found) if found else None


def baseline_note(results: Results) -> str | None:
    """Return the mean majority baseline of all variants; None for numbers."""
    shares = [share for one in results.variants if (share := majority_of(one)) is not None]
    if not shares:
        return None
    return (
        f"Majority baseline {metric_text('accuracy', fmean(shares))}: the accuracy of always "
        "predicting the most frequent class of the test set."
    )


def score_warnings(results: Results) -> list[str]:
    """Return sentences on variants with a class of recall 0 or a useless accuracy; at most ten."""
    found = list(_warnings(results))
    if len(found) <= _MAX_WARNINGS:
        return found
    more = len(found) - _MAX_WARNINGS
    return [*found[:_MAX_WARNINGS], f"{more} more such findings are in the table of classes."]


def _warnings(results: Results) -> Iterator[str]:
    for variant in results.variants:
        runs = _scores_of(variant)
        missed = Counter(one.name for run in runs for one in run.classes if one.is_missed)
        for name, count in missed.items() if len(missed) <= _MAX_NAMED else ():
            yield (
                f"{variant.name} finds no test example of class {quoted(name)} in {count} of "
                f"{len(runs)} runs: its recall is 0% there."
            )
        if len(missed) > _MAX_NAMED:
            yield f"{variant.name} has recall 0% in {len(missed)} classes of some run."
        useless = [run for run in runs if run.is_constant]
        if useless:
            yield (
                f"{variant.name} is no better than a constant answer in "
                f"{len(useless)} of {len(runs)} runs."
            )


def scores_table(results: Results) -> Table | None:
    """Return the recall by class for a terminal; None without classes.

    Of many classes it has those in which the variants differ most.
    """
    rows = recall_by_class(results)
    if len(rows) < 2:
        return None
    shown = sorted(rows, key=lambda one: (-one.spread, one.lowest))[:_MAX_ROWS]
    variants = [one.name for one in results.variants[:_MAX_COLUMNS]]
    prefix = common_words([one.name for one in results.variants])
    headings = ["examples", *(name.removeprefix(prefix) for name in variants)]
    title = "Recall by class, on the public test set" + (f"; {prefix}…" if prefix else "")
    table = figure_table(title, headings, texts=["class"])
    for row in rows:
        if row in shown:
            recalls = row.recalls[:_MAX_COLUMNS]
            table.add_row(row.name, f"{row.examples:,.0f}", *map(recall_text, recalls))
    notes = []
    if len(rows) > len(shown):
        notes.append(f"the {len(shown)} of {len(rows)} classes that differ most")
    if len(results.variants) > len(variants):
        every = len(results.variants)
        notes.append(f"{len(variants)} of {every} variants; comparison.html has all")
    table.caption = "\n".join(notes) or None
    return table


def scores_json(variant: VariantResult) -> dict[str, Any]:
    """Return the scores in a variant's entry of `comparison.json`."""
    runs = _scores_of(variant)
    names = dict.fromkeys(one.name for run in runs for one in run.classes)
    rows = [{"class": name, "recall": _mean_recall(runs, name)} for name in names]
    return {"majority": majority_of(variant), "by_class": rows}


def scores_context(results: Results) -> dict[str, Any] | None:
    """Return what the template of the page needs; None without classes."""
    rows = recall_by_class(results)
    if len(rows) < 2:
        return None
    return {
        "variants": [one.name for one in results.variants],
        "baseline": baseline_note(results),
        "warnings": score_warnings(results),
        "rows": [
            {
                "name": row.name,
                "examples": f"{row.examples:,.0f}",
                "recalls": [(recall_text(one), one == 0, one or 0.0) for one in row.recalls],
            }
            for row in rows
        ],
    }


def _scores_of(variant: VariantResult) -> list[Scores]:
    return [run.scores for run in variant.finished_runs if run.scores is not None]


def _mean_recall(runs: Sequence[Scores], name: str) -> float | None:
    found = [
        one.recall
        for run in runs
        for one in run.classes
        if one.name == name and one.recall is not None
    ]
    return fmean(found) if found else None
