"""`comparison.tex`: the table of a comparison for a paper, with booktabs."""

from collections.abc import Sequence

import fedsim
from fedsim.comparison.notes import seeds_text
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import Estimate
from fedsim.comparison.text import metric_words, p_text
from fedsim.core.formatting import delta_text, epsilon_text

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_NOTHING = "--"


def latex_tables(results: Results) -> str:
    """Return a `tabular` for the variants of each unit of privacy."""
    return "\n".join(_table(part) for part in results.by_unit)


def _table(results: Results) -> str:
    metric = results.metric
    deltas = {one.delta for one in results.variants if one.delta is not None}
    percent = metric.endswith("accuracy")
    with_tests = any(one.difference is not None for one in results.variants)
    heads = [
        "variant",
        r"$\varepsilon$",
        *([r"$\delta$"] if len(deltas) > 1 else []),
        escape_latex(metric_words(metric)) + (r" (\%)" if percent else ""),
    ]
    if with_tests:
        heads += [f"minus {escape_latex(str(results.baseline))}{' (pp)' if percent else ''}", "$p$"]
    lines = [
        *_comments(results, deltas),
        rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"\toprule",
        _line(heads),
        r"\midrule",
        *(_row(one, metric, deltas=len(deltas) > 1, tests=with_tests) for one in results.variants),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _comments(results: Results, deltas: set[float]) -> list[str]:
    unit = results.groups[0].unit
    facts = [
        f"{results.name}: {seeds_text(results)}; +- is half a 95 % t interval over the seeds",
        "p: paired t test against the baseline, adjusted by Holm's method",
        f"epsilon: the largest of any client in one run, unit {unit}" if unit else "",
        f"delta = {delta_text(next(iter(deltas)))}" if len(deltas) == 1 else "",
        f"written by fedsim {fedsim.__version__}; needs \\usepackage{{booktabs}}",
    ]
    return [f"% {fact}" for fact in facts if fact]


def _row(variant: VariantResult, metric: str, *, deltas: bool, tests: bool) -> str:
    difference = variant.difference
    epsilon = _NOTHING
    if variant.is_private and variant.delta is not None:
        finite = variant.epsilon is not None
        epsilon = rf"$\le {epsilon_text(variant.epsilon)}$" if finite else r"$\infty$"
    cells = [escape_latex(variant.name), epsilon]
    if deltas:
        cells.append(_NOTHING if variant.delta is None else _number(delta_text(variant.delta)))
    cells.append(_estimate(variant.metrics.get(metric), metric, sign=False))
    if tests:
        cells.append(_estimate(difference and difference.paired.estimate, metric, sign=True))
        p = None if difference is None else difference.holm_p
        cells.append(_NOTHING if p is None else f"${p_text(p)}$")
    return _line(cells)


def _estimate(estimate: Estimate | None, metric: str, *, sign: bool) -> str:
    if estimate is None:
        return _NOTHING
    scale, digits = (100, ".1f") if metric.endswith("accuracy") else (1, ".3g")
    text = _mantissa(f"{scale * estimate.mean:{'+' if sign else ''}{digits}}")
    if estimate.high is None:
        return f"${text}$"
    half = _mantissa(f"{scale * (estimate.high - estimate.mean):{digits}}")
    return rf"${text} \pm {half}$"


def _number(text: str) -> str:
    return f"${_mantissa(text)}$"


def _mantissa(text: str) -> str:
    """Return a number without the `e` of programs: `1e-05` is 10 to the power of -5."""
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    power = rf"10^{{{int(exponent)}}}"
    return power if mantissa == "1" else rf"{mantissa} \cdot {power}"


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def escape_latex(text: str) -> str:
    """Return a text with every character that LaTeX would read as a command escaped."""
    return "".join(_ESCAPES.get(character, character) for character in " ".join(text.split()))
