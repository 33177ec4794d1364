"""Candidates: schedules that the advice compares, and the settings that each of them changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fedsim.experiment import Experiment
from fedsim.tools.advice.facts import PublicFacts

FULL = "full"
RATES: tuple[object, ...] = (0.1, 0.25, 0.5, FULL)
_ROUNDS = (5, 10, 15, 20, 25, 30, 40, 60, 100, 150, 200, 300, 500, 1000)
_STEPS = (1, 5)
# lr · rounds · steps, the length of the path, over that of the file. A longer path is for a person
# to try who knows the scale of the data.
_PATHS = (0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
_FIGURES = 2  # significant digits of a learning rate


@dataclass(frozen=True)
class Candidate:
    """One schedule.

    Attributes:
        rounds: number of rounds.
        steps: local steps of a round.
        rate: sampling rate of all clients, or "full"; None: the lots of the file.
        weighting: value of `federation.weighting`; not part of a candidate's hash.
        learning_rate: of the local optimizer.
        sampling: another value of `privacy.sampling`; None: that of the file.
        correlation: another value of `privacy.noise_correlation`; None: that of the file.
    """

    rounds: int
    steps: int
    rate: float | str | None
    weighting: Any = field(hash=False)
    learning_rate: float
    sampling: str | None = None
    correlation: Any = field(default=None, hash=False)

    @property
    def local_steps(self) -> int:
        """Steps of a client that takes part in every round."""
        return self.rounds * self.steps


def file_candidate(experiment: Experiment, facts: PublicFacts) -> Candidate:
    """Return the schedule of the file itself; with `local.epochs`, steps of the median client.

    Args:
        experiment: the file's settings.
        facts: of the federation.
    """
    return Candidate(
        rounds=experiment.federation.rounds,
        steps=facts.steps,
        rate=None,
        weighting=weighting_of(experiment),
        learning_rate=experiment.local.optimizer.lr,
    )


def weighting_of(experiment: Experiment) -> Any:
    """Return `federation.weighting` as a name or a mapping."""
    return experiment.model_dump(mode="json")["federation"]["weighting"]


def candidate_grid(
    facts: PublicFacts, given: Candidate, *, rates: Sequence[object], weightings: Sequence[object]
) -> list[Candidate]:
    """Return all candidates: the file first, then each combination once.

    Args:
        facts: of the federation.
        given: the schedule of the file.
        rates: sampling rates to try, besides the lots of the file.
        weightings: values of `federation.weighting` to try.
    """
    rounds = sorted({r for r in _ROUNDS if r < facts.rounds} | {facts.rounds})
    steps = sorted({*_STEPS, facts.steps})
    grid = [given]
    for number, local, rate, weighting in product(rounds, steps, (None, *rates), weightings):
        grid += [
            Candidate(number, local, rate, weighting, lr)  # type: ignore[arg-type]
            for lr in _learning_rates(given, number * local)
        ]
    return list(_unique(grid))


def _learning_rates(given: Candidate, steps: int) -> list[float]:
    """Return learning rates that give paths of different lengths, and that of the file."""
    path = given.learning_rate * given.local_steps
    rates = {float(f"{path * share / steps:.{_FIGURES}g}") for share in _PATHS}
    return sorted(rates | {given.learning_rate})


def _unique(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    seen: set[str] = set()
    for candidate in candidates:
        key = repr(candidate)
        if key not in seen:
            seen.add(key)
            yield candidate


def changes_of(candidate: Candidate, experiment: Experiment, facts: PublicFacts) -> dict[str, Any]:
    """Return the settings that a candidate changes, `{"key.path": value}`.

    Args:
        candidate: the schedule.
        experiment: the file's settings.
        facts: of the federation.
    """
    given, changes = file_candidate(experiment, facts), dict[str, Any]()
    if candidate.rounds != given.rounds:
        changes["federation.rounds"] = candidate.rounds
    if candidate.weighting != given.weighting:
        changes["federation.weighting"] = candidate.weighting
    if candidate.steps != given.steps:
        changes["local.steps"] = candidate.steps
        if experiment.local.epochs is not None:
            changes["local.epochs"] = None
    changes |= _lot_changes(candidate, experiment, facts)
    if candidate.learning_rate != given.learning_rate:
        optimizer = experiment.local.optimizer.model_dump(mode="json", exclude_defaults=True)
        changes["local.optimizer"] = {**optimizer, "lr": candidate.learning_rate}
    if candidate.correlation is not None:
        changes["privacy.noise_correlation"] = candidate.correlation
    privacy = experiment.privacy
    if changes and privacy is not None and privacy.noise_multiplier is not None:
        # The same ε by calibrated noise: given noise would spend another ε on another schedule.
        changes["privacy.noise_multiplier"] = None
        changes["privacy.target_epsilon"] = facts.given_noise_epsilon
    return changes


def _lot_changes(
    candidate: Candidate, experiment: Experiment, facts: PublicFacts
) -> dict[str, Any]:
    """Return the changes of the batch size, and of the sampling and its rate."""
    privacy, batch_size, rate = experiment.privacy, experiment.local.batch_size, candidate.rate
    changes = dict[str, Any]()
    if rate == FULL and batch_size != FULL:
        changes["local.batch_size"] = FULL
    elif rate not in (None, FULL) and batch_size == FULL:
        changes["local.batch_size"] = max(1, round(float(str(rate)) * facts.typical_examples))
    if privacy is None:
        return changes
    sampling = privacy.sampling
    if candidate.sampling is not None:
        sampling = sampling.model_copy(update={"name": candidate.sampling})
    if rate is not None:
        sampling = sampling.model_copy(update={"rate": None if rate == FULL else rate})
    if sampling != privacy.sampling:
        written = sampling.model_dump(mode="json")
        changes["privacy.sampling"] = sampling.name if sampling.rate is None else written
    return changes
