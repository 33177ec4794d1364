"""Results of a comparison: means, differences and tests over the runs of all variants."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from fedsim.accountant.trust import CLAIMED_AGAINST
from fedsim.comparison.differences import (
    Baseline,
    PairCheck,
    SettingsTable,
    UnitGroup,
    check_pairs,
    group_by_unit,
    settings_table,
)
from fedsim.comparison.outcomes import RunOutcome, finite_values, shared_values
from fedsim.comparison.statistics import (
    Estimate,
    PairedDifference,
    holm,
    largest_of,
    paired_difference,
    t_interval,
)
from fedsim.comparison.unfit import UnfitVariant, unfit_variants
from fedsim.core.errors import FedsimError, InputError

_MAX_REASONS = 10
_PREFERRED = ("test_accuracy", "test_r2", "test_loss")


class ComparisonError(InputError):
    """Error of runs that cannot be compared; the message names the fix."""


class NothingFinishedError(FedsimError, RuntimeError):
    """Error of a comparison of which no run finished; the message says why each run failed."""


@dataclass(frozen=True)
class VariantResult:
    """The results of one variant."""

    name: str
    changes: Mapping[str, object]
    outcomes: tuple[RunOutcome, ...]
    # None for the baseline, without common seeds, or if the baseline is unfit
    difference: PairedDifference | None
    unfit: UnfitVariant | None = None  # why no other variant should be compared with it

    @property
    def is_private(self) -> bool:
        """Whether the variant's clients trained with differential privacy."""
        return self.outcomes[0].is_private

    @property
    def trust(self) -> str | None:
        """Trust model in which ε holds; None if not private."""
        return self.outcomes[0].trust

    @property
    def unit(self) -> str | None:
        """Privacy unit that ε protects, `example` or `client`; None without privacy settings."""
        return self.outcomes[0].unit

    @cached_property
    def metrics(self) -> dict[str, Estimate]:
        """Mean of each metric over the finished seeds."""
        runs = self.finished_runs
        names = dict.fromkeys(metric for run in runs for metric in run.metrics)
        values = {metric: list(finite_values(runs, metric).values()) for metric in names}
        return {metric: t_interval(numbers) for metric, numbers in values.items() if numbers}

    @property
    def epsilon(self) -> float | None:
        """The largest ε of any client in any run; None if infinite or not private."""
        return largest_of([run.epsilon for run in self.finished_runs])

    @property
    def delta(self) -> float | None:
        """The largest δ of any run; None if not private."""
        return max((run.delta for run in self.finished_runs if run.delta is not None), default=None)

    @property
    def seconds(self) -> Estimate | None:
        """Mean time of a run in seconds; None if no finished run recorded its time."""
        seconds = [run.seconds for run in self.finished_runs if run.seconds > 0]
        return t_interval(seconds) if seconds else None

    @property
    def certificates(self) -> dict[str, float | None]:
        """The largest ε of any run against each observer (adversary), by name; None: infinite."""
        entries = [run.certificates for run in self.finished_runs]
        names = dict.fromkeys(name for entry in entries for name in entry)
        return {name: largest_of([entry.get(name) for entry in entries]) for name in names}

    @property
    def observer(self) -> str | None:
        """The adversary against whom the variant's ε holds; None if not private."""
        return None if self.trust is None else CLAIMED_AGAINST[self.trust]

    @property
    def finished_runs(self) -> tuple[RunOutcome, ...]:
        """The results of the runs that reached their planned end."""
        return tuple(outcome for outcome in self.outcomes if outcome.is_finished)

    def to_json(self) -> dict[str, Any]:
        """Return the variant's entry in `comparison.json`."""
        return {
            "name": self.name,
            "changes": dict(self.changes),
            "private": self.is_private,
            "trust": self.trust,
            "unit": self.unit,
            "epsilon": self.epsilon,
            "against": self.observer,
            "certificates": self.certificates,
            "delta": self.delta,
            "metrics": {name: vars(estimate) for name, estimate in self.metrics.items()},
            "difference": None if self.difference is None else self.difference.to_json(),
            "seconds": None if self.seconds is None else vars(self.seconds),
            "runs": [outcome.to_json() for outcome in self.outcomes],
        }


@dataclass(frozen=True)
class Results:
    """The results of a comparison: of all variants, or of the variants of one privacy unit."""

    name: str
    metric: str
    baseline: Baseline
    seeds: tuple[int, ...]
    variants: tuple[VariantResult, ...]
    pair_check: PairCheck
    settings: SettingsTable = field(default_factory=SettingsTable)
    remarks: tuple[str, ...] = ()  # notes, such as on runs that were left out
    unit: str | None = None  # the privacy unit of all variants, if the comparison has two
    remedy: str | None = None  # a command that tunes every variant

    @property
    def outcomes(self) -> tuple[RunOutcome, ...]:
        """The results of all single runs of all variants."""
        return tuple(outcome for variant in self.variants for outcome in variant.outcomes)

    @property
    def groups(self) -> tuple[UnitGroup, ...]:
        """The variants grouped by privacy unit; only variants of one unit are compared."""
        units = {variant.name: variant.unit for variant in self.variants}
        return group_by_unit(units, self.baseline)

    @property
    def unfit(self) -> tuple[UnfitVariant, ...]:
        """The variants that no other one should be compared with, each with the reasons."""
        return tuple(v.unfit for v in self.variants if v.unfit is not None)

    @property
    def deltas(self) -> frozenset[float]:
        """The values of δ of the variants with privacy."""
        return frozenset(v.delta for v in self.variants if v.delta is not None)

    @property
    def by_unit(self) -> tuple["Results", ...]:
        """The same results, split into one `Results` for each privacy unit."""
        groups = self.groups
        return tuple(
            replace(
                self,
                baseline=group.baseline,
                variants=tuple(variant for variant in self.variants if variant.name in group.names),
                settings=self.settings.among(group.names),
                unit=group.unit if len(groups) > 1 else None,
            )
            for group in groups
        )


def summarise(
    name: str,
    outcomes: Sequence[RunOutcome],
    *,
    metric: str | None,
    baseline: Baseline,
    seeds: tuple[int, ...],
    settings: Mapping[str, Mapping[str, object]],
    changes: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    remarks: Iterable[str] = (),
) -> Results:
    """Return the means, differences and tests of a comparison from the results of its runs.

    If `metric` is None, it is one that all runs have, if possible the main metric. `settings` are
    those of `compared_settings` by variant, in the order of the results. Runs without a common
    metric raise a ComparisonError, and a NothingFinishedError if no run finished.
    """
    finished = [outcome for outcome in outcomes if outcome.is_finished]
    if not finished:
        raise NothingFinishedError(_nothing_finished(outcomes))
    metric = _metric(metric, finished)
    by_name = {
        variant: tuple(outcome for outcome in outcomes if outcome.variant == variant)
        for variant in settings
    }
    units = {variant: runs[0].unit for variant, runs in by_name.items()}
    compared = [pair for group in group_by_unit(units, baseline) for pair in group.pairs]
    unfit = {entry.variant: entry for entry in unfit_variants(metric, by_name, settings)}
    pairs: dict[str, PairedDifference] = {}
    for variant, base in compared:
        shared = shared_values(by_name[variant], by_name[base], metric)
        if shared and base not in unfit:
            values, subtracted = zip(*shared.values(), strict=True)
            pairs[variant] = replace(paired_difference(values, subtracted), seeds=tuple(shared))
    adjusted = holm([pair.t_p for pair in pairs.values()])
    for (variant, pair), holm_p in zip(list(pairs.items()), adjusted, strict=True):
        pairs[variant] = replace(pair, holm_p=holm_p)
    digests = {
        variant: {run.seed: run.pair_digests for run in runs if run.is_finished}
        for variant, runs in by_name.items()
    }
    return Results(
        name=name,
        metric=metric,
        baseline=baseline,
        seeds=seeds,
        variants=tuple(
            VariantResult(one, changes.get(one, {}), runs, pairs.get(one), unfit.get(one))
            for one, runs in by_name.items()
        ),
        pair_check=check_pairs(digests, compared),
        settings=settings_table(settings),
        remarks=tuple(remarks),
    )


def _metric(asked: str | None, finished: Sequence[RunOutcome]) -> str:
    known = [name for name in finished[0].metrics if all(name in run.metrics for run in finished)]
    if not known:
        metrics_of = {run.variant: ", ".join(run.metrics) or "none" for run in finished}
        listed = "; ".join(f"{name} has {metrics}" for name, metrics in metrics_of.items())
        raise ComparisonError(
            f"the variants have no metric in common: {listed}. Compare models with one kind of loss"
        )
    if asked is None:
        first = finished[0].main_metric
        return next(name for name in (first, *_PREFERRED, *known) if name in known and name)
    if asked not in known:
        raise ComparisonError(
            f"metric: the runs have no {asked}; they have {', '.join(known)}. Nothing is lost: "
            "finished runs are not run again"
        )
    return asked


def _nothing_finished(outcomes: Sequence[RunOutcome]) -> str:
    lines = [f"{run.path}: {run.reason}" for run in outcomes if run.reason is not None]
    more = [f"and {len(lines) - _MAX_REASONS} more"] if len(lines) > _MAX_REASONS else []
    head = "no run was finished, so there is nothing to compare"
    return "\n".join([head, *lines[:_MAX_REASONS], *more])
