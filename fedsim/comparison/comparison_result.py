"""The result of a comparison."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.scores import scores_json
from fedsim.comparison.text import (
    difference_text,
    guarantee_text,
    interval_text,
    metric_words,
    notes_of,
    seeds_text,
)
from fedsim.comparison.tuning import Tuning


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """The result of a comparison.

    Attributes:
        path: directory of the comparison.
        results: means, differences and tests.
        tuning: privacy cost of all runs together.
        interrupted: whether the user stopped it; runs are then missing.
    """

    path: Path
    results: Results
    tuning: Tuning
    interrupted: bool

    @property
    def failed(self) -> tuple[RunOutcome, ...]:
        """The runs that failed."""
        return tuple(one for one in self.results.outcomes if one.status == "failed")

    def to_json(self) -> dict[str, Any]:
        """Return the content of `comparison.json`."""
        content = self.results.to_json()
        for entry, variant in zip(content["variants"], self.results.variants, strict=True):
            entry["scores"] = scores_json(variant)
        return {**content, "notes": notes_of(self.results), "tuning": self.tuning.to_json()}

    def __repr__(self) -> str:
        results = self.results
        means = [f"{one.name} {self._mean(one)}" for one in results.variants]
        seeds = seeds_text(results)
        return (
            f"ComparisonResult({str(self.path)!r}: {metric_words(results.metric)}, {seeds}: "
            f"{', '.join(means)})"
        )

    def _repr_html_(self) -> str:
        """Return the table of the variants, for notebooks."""
        results = self.results
        head = ("variant", "guarantee", metric_words(results.metric), "minus baseline")
        rows = [
            (one.name, guarantee_text(one), self._mean(one), self._difference(one))
            for one in results.variants
        ]
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        page = f"<code>{escape(str(self.path / 'comparison.html'))}</code>"
        return (
            f"<p><b>{escape(results.name)}</b>: {seeds_text(results)}; the whole report: "
            f"{page}</p><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _mean(self, variant: VariantResult) -> str:
        estimate = variant.metrics.get(self.results.metric)
        return "–" if estimate is None else interval_text(self.results.metric, estimate)

    def _difference(self, variant: VariantResult) -> str:
        difference = variant.difference
        if difference is None:
            return "–"
        return difference_text(self.results.metric, difference.paired.estimate)
