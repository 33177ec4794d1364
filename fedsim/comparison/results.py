"""The numbers of a comparison, computed from the outcomes of all runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.statistics import (
    CONFIDENCE,
    Estimate,
    PairedDifference,
    holm,
    paired_difference,
    t_interval,
)
from fedsim.core.errors import FedsimError, InputError
from fedsim.runs.files import SCHEMAS

_MAX_REASONS = 10
_PREFERRED = ("test_accuracy", "test_r2", "test_loss")


class ComparedVariant(Protocol):
    """A variant of what is compared."""

    @property
    def name(self) -> str:
        """Name in results."""
        ...

    @property
    def changes(self) -> Mapping[str, object]:
        """Changes to the base experiment, as `{"key.path": value}`; none of given runs."""
        ...

    @property
    def settings(self) -> Mapping[str, object]:
        """All settings but name and seed, as `{"key.path": value}`."""
        ...

    @property
    def unit(self) -> str | None:
        """What its ε protects, `example` or `client`; None without privacy."""
        ...


class Compared(Protocol):
    """What is compared: the variants of a comparison file, or runs that were given."""

    @property
    def name(self) -> str:
        """Name of the comparison."""
        ...

    @property
    def metric(self) -> str | None:
        """The metric to compare; None: the first of accuracy, R² and loss that all runs have."""
        ...

    @property
    def baseline(self) -> Baseline:
        """The variant that all others are compared with, or that of each unit."""
        ...

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of all variants together."""
        ...

    @property
    def variants(self) -> Sequence[ComparedVariant]:
        """The variants in order."""
        ...


class ComparisonError(InputError):
    """A comparison without a result; the message names the fix."""


class NothingFinishedError(FedsimError, RuntimeError):
    """A comparison without a finished run; the message has the reasons."""


@dataclass(frozen=True)
class Difference:
    """A variant minus the baseline, over the seeds that both finished.

    Attributes:
        seeds: those seeds.
        paired: mean, interval and tests.
        holm_p: the t test's p value, adjusted for all variants of the comparison.
    """

    seeds: tuple[int, ...]
    paired: PairedDifference
    holm_p: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the `difference` of a variant in `comparison.json`."""
        return {
            "seeds": list(self.seeds),
            **_estimate_json(self.paired.estimate),
            "t_p": self.paired.t_p,
            "holm_p": self.holm_p,
            "sign_flip_p": self.paired.sign_flip_p,
            "sign_flip_floor": self.paired.sign_flip_floor,
        }


@dataclass(frozen=True)
class VariantResult:
    """The results of one variant.

    Attributes:
        name: name of the variant.
        changes: its changes to the base experiment.
        is_private: whether its clients trained with differential privacy.
        outcomes: one for each seed.
        metrics: means over the finished seeds.
        difference: to the baseline in the compared metric; None for the baseline itself, or
            where no seed finished in both.
        epsilon: the largest ε of any client in any of its runs; None if infinite or not private.
        delta: the largest δ of any of its runs; None if not private.
        seconds: mean time of a run; None if none finished.
        trust: trust model of its ε; None if not private.
        unit: what its ε protects, `example` or `client`; None if not private.
        certificates: the largest ε of any of its runs against each observer; None if infinite.
    """

    name: str
    changes: Mapping[str, object]
    is_private: bool
    outcomes: tuple[RunOutcome, ...]
    metrics: Mapping[str, Estimate]
    difference: Difference | None
    epsilon: float | None
    delta: float | None
    seconds: Estimate | None
    trust: str | None = None
    unit: str | None = None
    certificates: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def observer(self) -> str | None:
        """The observer that its ε is claimed against; None if not private."""
        return None if self.trust is None else CLAIMED_AGAINST[self.trust]

    @property
    def finished_runs(self) -> tuple[RunOutcome, ...]:
        """The outcomes of finished runs."""
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
            "certificates": dict(self.certificates),
            "delta": self.delta,
            "metrics": {name: _estimate_json(one) for name, one in self.metrics.items()},
            "difference": None if self.difference is None else self.difference.to_json(),
            "seconds": None if self.seconds is None else _estimate_json(self.seconds),
            "runs": [outcome.to_json() for outcome in self.outcomes],
        }


@dataclass(frozen=True)
class Results:
    """The numbers of a comparison.

    Attributes:
        name: name of the comparison.
        metric: the compared metric.
        baseline: name of the variant that the others are compared with, or that of each unit.
        seeds: the seeds of all variants together.
        variants: in the order of the file.
        pair_check: whether paired runs share data, initial model and participants.
        settings: the settings in which variants differ.
        remarks: what a reader must know besides `notes`, such as runs that were left out.
        has_sibling: whether these are the variants of one unit of two.
    """

    name: str
    metric: str
    baseline: Baseline
    seeds: tuple[int, ...]
    variants: tuple[VariantResult, ...]
    pair_check: PairCheck
    settings: SettingsTable = field(default_factory=SettingsTable)
    remarks: tuple[str, ...] = ()
    has_sibling: bool = False

    @property
    def outcomes(self) -> tuple[RunOutcome, ...]:
        """The outcomes of all variants."""
        return tuple(outcome for variant in self.variants for outcome in variant.outcomes)

    @property
    def groups(self) -> tuple[UnitGroup, ...]:
        """The variants of each unit; only those of one unit are compared with each other."""
        return group_by_unit({one.name: one.unit for one in self.variants}, self.baseline)

    @property
    def by_unit(self) -> tuple["Results", ...]:
        """The results of each unit alone."""
        return tuple(
            replace(
                self,
                baseline=group.baseline,
                variants=tuple(one for one in self.variants if one.name in group.names),
                has_sibling=len(self.groups) > 1,
            )
            for group in self.groups
        )

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of `comparison.json`."""
        return {
            "schema": SCHEMAS["comparison.json"],
            "name": self.name,
            "metric": self.metric,
            "baseline": self.baseline if isinstance(self.baseline, str) else dict(self.baseline),
            "seeds": list(self.seeds),
            "confidence": CONFIDENCE,
            "pairing": self.pair_check.to_json(),
            "variants": [variant.to_json() for variant in self.variants],
            "settings": self.settings.to_json(),
        }


def summarise(comparison: Compared, outcomes: Sequence[RunOutcome]) -> Results:
    """Return the numbers of a comparison.

    Args:
        comparison: what is compared.
        outcomes: the outcome of every run.

    Raises:
        ComparisonError: the runs do not have the metric of the comparison file.
        NothingFinishedError: no run was finished.
    """
    finished = [outcome for outcome in outcomes if outcome.is_finished]
    if not finished:
        raise NothingFinishedError(_nothing_finished(outcomes))
    metric = _metric(comparison.metric, finished)
    by_name = {
        variant.name: tuple(one for one in outcomes if one.variant == variant.name)
        for variant in comparison.variants
    }
    units = {variant.name: variant.unit for variant in comparison.variants}
    compared = [pair for group in group_by_unit(units, comparison.baseline) for pair in group.pairs]
    pairs = {name: _paired(by_name[name], by_name[base], metric) for name, base in compared}
    adjusted = dict(
        zip(pairs, holm([pair and pair[1].t_p for pair in pairs.values()]), strict=True)
    )
    variants = []
    for variant in comparison.variants:
        pair = pairs.get(variant.name)
        difference = None if pair is None else Difference(*pair, holm_p=adjusted[variant.name])
        variants.append(_variant(variant.name, variant.changes, by_name[variant.name], difference))
    digests = {
        name: {one.seed: one.pair_digests for one in own if one.is_finished}
        for name, own in by_name.items()
    }
    return Results(
        name=comparison.name,
        metric=metric,
        baseline=comparison.baseline,
        seeds=comparison.seeds,
        variants=tuple(variants),
        pair_check=check_pairs(digests, compared),
        settings=settings_table({one.name: one.settings for one in comparison.variants}),
    )


def _metric(asked: str | None, finished: Sequence[RunOutcome]) -> str:
    known = [name for name in finished[0].metrics if all(name in one.metrics for one in finished)]
    if not known:
        found = {one.variant: ", ".join(one.metrics) or "none" for one in finished}
        each = "; ".join(f"{name} has {metrics}" for name, metrics in found.items())
        raise ComparisonError(
            f"the variants have no metric in common: {each}. Compare models with one kind of loss"
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
    lines = [f"{one.path}: {one.reason}" for one in outcomes if one.reason is not None]
    more = [f"and {len(lines) - _MAX_REASONS} more"] if len(lines) > _MAX_REASONS else []
    head = "no run was finished, so there is nothing to compare"
    return "\n".join([head, *lines[:_MAX_REASONS], *more])


def finite_values(outcomes: Sequence[RunOutcome], metric: str) -> dict[int, float]:
    """Return the finite values of the finished runs by seed."""
    return {
        one.seed: value
        for one in outcomes
        if one.is_finished and (value := one.metrics.get(metric)) is not None
    }


def _paired(
    own: Sequence[RunOutcome], baseline: Sequence[RunOutcome], metric: str
) -> tuple[tuple[int, ...], PairedDifference] | None:
    mine, other = finite_values(own, metric), finite_values(baseline, metric)
    seeds = tuple(seed for seed in mine if seed in other)
    if not seeds:
        return None
    pairs = paired_difference([mine[seed] for seed in seeds], [other[seed] for seed in seeds])
    return seeds, pairs


def _variant(
    name: str,
    changes: Mapping[str, object],
    outcomes: tuple[RunOutcome, ...],
    difference: Difference | None,
) -> VariantResult:
    finished = [one for one in outcomes if one.is_finished]
    names = list(dict.fromkeys(metric for one in finished for metric in one.metrics))
    values = {metric: list(finite_values(finished, metric).values()) for metric in names}
    epsilons = [one.epsilon for one in finished]
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    return VariantResult(
        name=name,
        changes=changes,
        is_private=outcomes[0].is_private,
        outcomes=outcomes,
        metrics={metric: t_interval(found) for metric, found in values.items() if found},
        difference=difference,
        epsilon=max(known) if known and len(known) == len(epsilons) else None,
        delta=max((one.delta for one in finished if one.delta is not None), default=None),
        seconds=t_interval([one.seconds for one in finished]) if finished else None,
        trust=outcomes[0].trust,
        unit=outcomes[0].unit,
        certificates=_largest([one.certificates for one in finished]),
    )


def _largest(certificates: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the largest ε of any run against each observer; None if one is infinite."""
    found: dict[str, float | None] = {}
    for observer in dict.fromkeys(name for one in certificates for name in one):
        values = [one.get(observer) for one in certificates]
        known = [value for value in values if value is not None]
        found[observer] = max(known) if len(known) == len(values) else None
    return found


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    return {
        "n": estimate.n,
        "mean": estimate.mean,
        "sd": estimate.sd,
        "low": estimate.low,
        "high": estimate.high,
    }
