"""Early stopping on the public test set: the run ends when a metric improves no more.

The metrics are functions of released models and public examples, so the decision is
post-processing: it costs no ε. Noise is planned for all rounds, and what ran is charged.
"""

import math
from typing import Literal

from pydantic import Field

from fedsim.core.limits import MAX_ROUNDS
from fedsim.core.metrics import metric_entry
from fedsim.core.settings import Settings

Best = tuple[float, int]
"""The best value of the metric so far, and its round."""


class EarlyStoppingSettings(Settings):
    """`federation.early_stopping`: ends the run when a metric improves no more."""

    metric: str = Field(
        default="loss",
        description="metric of the global model on the public test set: loss, or one of "
        "evaluation.metrics",
    )
    patience: int = Field(
        ge=1, le=MAX_ROUNDS, description="rounds without an improvement after which the run ends"
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="an improvement is a change by more than this"
    )
    goal: Literal["min", "max"] | None = Field(
        default=None,
        description="whether smaller or larger values are better; null: smaller for loss, log_loss "
        "and errors, larger for the others",
    )

    def next_best(self, best: Best | None, value: object, round_number: int) -> Best | None:
        """Return the best value after a round; one that is not a finite number never is.

        Args:
            best: the best value before; None before the first.
            value: the metric after the round.
            round_number: the round >= 1.
        """
        if not isinstance(value, int | float) or not math.isfinite(value):
            return best
        sign = 1.0 if self._smaller_is_better else -1.0
        if best is None or sign * (best[0] - value) > self.min_delta:
            return float(value), round_number
        return best

    def reason_to_stop(self, best: Best | None, round_number: int) -> str | None:
        """Return why the run ends after a round; None: it goes on.

        Args:
            best: the best value so far.
            round_number: rounds finished.
        """
        value, since = best or (math.nan, 0)
        if round_number - since < self.patience:
            return None
        found = f"{value:.4g} in round {since}" if since else "there was no finite value"
        return (
            f"test_{self.metric} has not improved by more than {self.min_delta:g} for "
            f"{self.patience} rounds; best: {found} (federation.early_stopping)"
        )

    @property
    def _smaller_is_better(self) -> bool:
        smaller = metric_entry(self.metric).smaller_is_better
        return smaller if self.goal is None else self.goal == "min"
