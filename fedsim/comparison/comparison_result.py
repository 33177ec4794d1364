"""The result of a comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results
from fedsim.comparison.tuning import Tuning


@dataclass(frozen=True)
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
        return {**self.results.to_json(), "tuning": self.tuning.to_json()}
