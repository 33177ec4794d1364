"""Unfit variants: variants that no other variant should be compared with.

The difference between a model and one that learnt nothing tells nothing about the first model. A
variant is unfit if one of three facts holds:

- Its metric is no better than that of the best constant answer, or it always predicts one class.
- Its loss is not finite; or in every run the loss is above that of the best constant answer, and
  the metric is not clearly better than that of a constant answer. A large loss alone is no such
  fact: a model that is too sure of its answers has a large loss, but may have a useful accuracy.
- A variant with less information is better, beyond the interval of their difference. A variant has
  more information than another one with a smaller ε. No privacy counts as more than clipping
  without noise, which counts as more than any ε; pooled data as more than a federation, which
  counts as more than a single client.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean

from fedsim.comparison.outcomes import RunOutcome, shared_values
from fedsim.comparison.statistics import CONFIDENCE, largest_of, t_interval
from fedsim.core.metrics import GROUP_ACCURACY, LOSS, metric_entry

_SAME_EPSILON = 0.02  # relative: calibration leaves as much
_MISSING = object()

# Keys that may differ between variants of which one has more information than the other.
_TUNED = ("local.optimizer", "local.lr_schedule", "federation.weighting", "secure_aggregation")
_OF_NOISE = (
    *(f"privacy.{key}" for key in ("target_epsilon", "noise_multiplier", "on_exhausted", "noise")),
    *(f"privacy.{key}" for key in ("max_grad_norm", "max_update_norm", "accountant.target_rho")),
)
_OF_CLIPPING_ALONE = ("privacy.trust", "privacy.noise_correlation")
_OF_POOLING = (
    *("data.partition", "local.batch_size", "privacy.sampling.rate", "privacy.trust", "faults"),
    *(f"federation.{key}" for key in ("clients_per_round", "participation", "strategy")),
    "federation.ema_decay",
)


@dataclass(frozen=True)
class UnfitVariant:
    """A variant that no other one should be compared with, and the reasons."""

    variant: str
    constant: float | None  # mean metric of the best constant answer, if that is not worse
    answer: str | None  # the class that it predicts; None in regression, or with several labels
    is_constant: bool
    has_useless_loss: bool
    constant_loss: float | None  # mean test loss of the best constant answer
    worse_than: tuple[str, ...]  # variants with less information, the best one first


_Runs = Mapping[str, Sequence[RunOutcome]]
_Settings = Mapping[str, object]


def unfit_variants(
    metric: str, runs: _Runs, settings: Mapping[str, _Settings]
) -> Iterator[UnfitVariant]:
    """Yield the variants that no other one should be compared with.

    Guarantee: if no variant is truly worse than one with less information, `worse_than` is empty
    for all of them with probability at least 95 %. This holds for normal differences, since the
    intervals are simultaneous over all ordered pairs (Bonferroni).
    """
    worse, entry = _worse_than(metric, runs, settings), metric_entry(metric)
    for name, outcomes in runs.items():
        finished = [run for run in outcomes if run.is_finished]
        scores = [run.scores for run in finished if run.scores is not None]
        predicted = {scored.constant_class for scored in scores}
        single = predicted.pop() if len(predicted) == 1 else None
        most = next((scored.majority and scored.majority.name for scored in scores), None)
        pairs = _against_constant(metric, finished)
        losses = [other for _, other in _against_constant(f"test_{LOSS}", finished)]
        is_beaten = bool(pairs) and fmean(_gains(metric, pairs)) <= 0.0
        unfit = UnfitVariant(
            variant=name,
            constant=fmean([value for _, value in pairs]) if is_beaten else None,
            answer=most if is_beaten else single,
            is_constant=is_beaten or (entry.one_class_is_constant and single is not None),
            has_useless_loss=_has_useless_loss(metric, finished),
            constant_loss=fmean(losses) if losses else None,
            worse_than=worse.get(name, ()),
        )
        if unfit.is_constant or unfit.has_useless_loss or unfit.worse_than:
            yield unfit


def _has_useless_loss(metric: str, finished: Sequence[RunOutcome]) -> bool:
    loss = f"test_{LOSS}"
    if any(run.metrics.get(loss, 0.0) is None for run in finished):
        return True
    losses = _against_constant(loss, finished)
    if not (losses and metric.startswith("test_") and len(losses) == len(finished)):
        return False
    if max(_gains(loss, losses)) >= 0.0:
        return False
    pairs = _against_constant(metric, finished) or _against_constant("test_accuracy", finished)
    gain = t_interval(_gains(metric, pairs)) if pairs else None
    return gain is None or (gain.mean if gain.low is None else gain.low) <= 0.0


def _against_constant(metric: str, finished: Sequence[RunOutcome]) -> list[tuple[float, float]]:
    """Return (value, value of the best constant answer) of each run that has both."""
    values = [(run.metrics.get(metric), run.constant_metrics.get(metric)) for run in finished]
    return [(value, other) for value, other in values if value is not None and other is not None]


def _gains(metric: str, pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return how much better each value is than the constant answer's."""
    sign = -1.0 if metric_entry(metric).smaller_is_better else 1.0
    return [sign * (value - constant) for value, constant in pairs]


def _worse_than(
    metric: str, runs: _Runs, settings: Mapping[str, _Settings]
) -> dict[str, tuple[str, ...]]:
    """Return for each variant those with less information that are clearly better.

    The accuracy of a group of examples is that of its own client's model, which was fitted to the
    group, if every client has a model of its own. A common model cannot know which group an example
    is of, so the two are not compared in this metric.
    """
    levels = {name: _privacy_level(outcomes, settings[name]) for name, outcomes in runs.items()}
    pairs = [
        (more, less)
        for more, less in permutations(runs, 2)
        if _has_more(levels[more], levels[less], settings[more], settings[less])
        and not (
            metric.endswith(GROUP_ACCURACY)
            and _pooling(settings[less]) == 0 < _pooling(settings[more])
        )
    ]
    better: dict[str, list[tuple[float, str]]] = {}
    for more, less in pairs:
        if shared := list(shared_values(runs[less], runs[more], metric).values()):
            confidence = 1.0 - (1.0 - CONFIDENCE) / len(pairs)
            gain = t_interval(_gains(metric, shared), confidence=confidence)
            if gain.low is not None and gain.low > 0.0:
                better.setdefault(more, []).append((gain.mean, less))
    return {
        name: tuple(less for _, less in sorted(gains, reverse=True))
        for name, gains in better.items()
    }


_Level = tuple[int, float]  # (2, 0) without privacy, (1, 0) with clipping alone, (0, ε)


def _has_more(level: _Level | None, less: _Level | None, mine: _Settings, other: _Settings) -> bool:
    """Return whether the first variant has more information than the second, all else equal."""
    if level is None or less is None:
        return False
    is_close = math.isclose(level[1], less[1], rel_tol=_SAME_EPSILON)
    same_noise, pooling = level[0] == less[0] and is_close, _pooling(mine) - _pooling(other)
    if pooling < 0 or (same_noise and pooling == 0) or (level < less and not same_noise):
        return False
    free = [*_TUNED, *(_OF_POOLING if pooling else ())]
    if level[0] == 2:
        free.append("privacy")
    elif not same_noise:
        free += [*_OF_NOISE, *(() if level[0] == 0 else _OF_CLIPPING_ALONE)]
    sections = tuple(f"{name}." for name in free)
    return all(
        f"{key}.".startswith(sections) or mine.get(key, _MISSING) == other.get(key, _MISSING)
        for key in {**mine, **other}
    )


def _privacy_level(outcomes: Sequence[RunOutcome], settings: _Settings) -> _Level | None:
    """Return how much of the noise a variant is without; None for an infinite ε."""
    if not outcomes[0].is_private:
        return (2, 0.0) if settings.get("privacy", _MISSING) is None else (1, 0.0)
    largest = largest_of([run.epsilon for run in outcomes if run.is_finished])
    return None if largest is None else (0, largest)


def _pooling(settings: _Settings) -> int:
    """Return 2 for one client with all examples, 1 for a federation, 0 for each client alone."""
    if settings.get("data.partition.num_clients") == 1:
        return 2
    return 0 if settings.get("federation.strategy") == "local_only" else 1
