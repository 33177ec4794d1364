"""The numbers of a comparison as text."""

from collections.abc import Sequence

from fedsim.comparison.results import VariantResult
from fedsim.comparison.statistics import Estimate
from fedsim.core.formatting import duration_text, epsilon_text, metric_text
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
