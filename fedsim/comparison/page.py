"""The HTML report of a comparison: one file for offline reading, print and small screens.

The page has one script, which sorts tables. The content security policy of the page names the hash
of this script, so no other script can run, even if unescaped text from a file got into the page.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fedsim
from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.differences import shared_text
from fedsim.comparison.figures.settings import against_settings
from fedsim.comparison.figures.variants import pictures_of, spend_sentence
from fedsim.comparison.jobs import MARKER
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.text import (
    NOTHING,
    OTHER_VALUES,
    baseline_note,
    common_words,
    difference_text,
    group_estimates,
    group_names,
    guarantee_text,
    interval_text,
    majority_of,
    mean_text,
    metric_words,
    minus_text,
    notes_of,
    observer_text,
    p_text,
    recall_by_class,
    score_warnings,
    seconds_text,
    seeds_text,
    unfit_sentences,
)
from fedsim.comparison.worker import WARNING
from fedsim.core.formatting import delta_text, duration_text, epsilon_text, metric_text
from fedsim.report.drawing import inline_svg
from fedsim.report.html import render_page, script_context
from fedsim.report.overview import Card
from fedsim.runs.directory import RunDirectory

_MAX_RUNS = 2000
_MAX_GROUPS = 8  # columns of groups of test examples, such as hospitals
_Cell = tuple[str, str, float | str | None]  # heading, text, and value to sort by; None comes last


def _table(cells: Mapping[str, Sequence[_Cell]]) -> dict[str, Any]:
    """Return the template's table of variants, which readers can sort by each column.

    A setting key with which all names begin, such as `target_epsilon=`, becomes the heading of the
    first column. Variants have the colours 1, 2, ... in all figures.
    """
    prefix = common_words(list(cells))
    headings = [heading for heading, _, _ in next(iter(cells.values()))]
    rows = [
        {"name": name.removeprefix(prefix), "series": number, "cells": row, "link": None}
        for number, (name, row) in enumerate(cells.items(), start=1)
    ]
    return {"headings": [prefix or "variant", *headings], "rows": rows}


def variants_table(results: Results) -> dict[str, Any]:
    """Return the table of the variants: mean, interval, difference to the baseline, and time."""
    return _table({variant.name: list(_cells(results, variant)) for variant in results.variants})


def _cells(results: Results, variant: VariantResult) -> Iterator[_Cell]:
    """Yield the heading, the text and the value to sort by of each cell of a variant."""
    difference, finished = variant.difference, len(variant.finished_runs)
    yield "guarantee", guarantee_text(variant), variant.epsilon if variant.is_private else None
    if len(results.deltas) > 1:
        yield "δ", NOTHING if variant.delta is None else delta_text(variant.delta), variant.delta
    estimate = variant.metrics.get(results.metric)
    yield metric_words(results.metric), mean_text(results, variant), estimate and estimate.mean
    estimates = group_estimates(variant)
    for name in group_names(results)[1][:_MAX_GROUPS]:
        group = estimates.get(name)
        yield f"accuracy, {name}", interval_text("accuracy", group), group and group.mean
    minus = "baseline" if variant.name == results.baseline else minus_text(results, variant)
    yield f"minus {results.baseline}", minus, difference and difference.estimate.mean
    p, sign_flip_p = (difference.holm_p, difference.sign_flip_p) if difference else (None, None)
    yield "p (t test)", p_text(p), p
    yield "p (signs)", p_text(sign_flip_p), sign_flip_p
    if any(other.trust not in (None, "local") for other in results.variants):
        yield "trust", variant.trust or NOTHING, variant.trust
        yield "observer", observer_text(variant), variant.observer
    yield "seeds", f"{finished}/{len(variant.outcomes)}", finished
    yield "time", seconds_text(variant.seconds), variant.seconds and variant.seconds.mean


def differences_table(results: Results) -> dict[str, Any] | None:
    """Return the table of settings in which variants of one unit differ; None without any."""
    settings = results.settings
    if not settings.keys:
        return None
    cells: dict[str, list[_Cell]] = {}
    for name, values in settings.values.items():
        texts = [(key, settings.texts[name][key], values.get(key)) for key in settings.keys]
        cells[name] = [(k, t, v if isinstance(v, int | float) else t) for k, t, v in texts]
    return _table(cells)


def runs_table(results: Results) -> dict[str, Any]:
    """Return the table of the first `_MAX_RUNS` runs, each with a link to its report."""
    units = [enumerate(part.variants, start=1) for part in results.by_unit]
    series = {variant.name: number for unit in units for number, variant in unit}
    rows = [
        {
            "name": run.variant,
            "series": series[run.variant],
            "cells": _run_cells(run, results.metric),
            "link": f"{quote(run.path)}/report.html",
        }
        for run in results.outcomes[:_MAX_RUNS]
    ]
    return {"headings": ["variant", *(heading for heading, _, _ in rows[0]["cells"])], "rows": rows}


def _run_cells(run: RunOutcome, metric: str) -> list[_Cell]:
    value = run.metrics.get(metric)
    is_known = run.is_finished or not run.is_private
    text = metric_text(metric, value) if metric in run.metrics else NOTHING
    return [
        ("seed", str(run.seed), run.seed),
        ("status", run.status, run.status),
        (metric_words(metric), text, value),
        ("guarantee", guarantee_text(run) if is_known else NOTHING, run.epsilon),
        ("rounds", f"{len(run.rounds)}", len(run.rounds)),
        ("time", duration_text(run.seconds) if run.seconds else NOTHING, run.seconds or None),
    ]


_HERE = Path(__file__).parent
_MAX_SETTINGS_CHARACTERS = 30_000


def render_comparison(result: ComparisonResult) -> str:
    """Return the report of a comparison as HTML; all text from files is escaped."""
    results = result.results
    parts = results.by_unit
    settings = (result.path / MARKER).read_text(encoding="utf-8")
    page = {
        **script_context(_HERE / "sort.js"),
        "result": result,
        "version": fedsim.__version__,
        "inline_svg": inline_svg,
        "unfit": unfit_sentences(results),
        "other_values": OTHER_VALUES,
        "cards": [*(card for part in parts for card in _cards(part)), *_run_cards(results)],
        "units": [_unit(part) for part in parts],
        "notes": notes_of(results),
        "guaranteed": shared_text(list(_guarantees(result))),
        "client_warning": WARNING,
        "runs": runs_table(results),
        "settings": settings[:_MAX_SETTINGS_CHARACTERS],
    }
    return render_page("comparison.html.jinja", page, _HERE)


def _unit(part: Results) -> dict[str, Any]:
    """Return the tables, figures and notes of one privacy unit's variants."""
    return {
        "results": part,
        "table": variants_table(part),
        "differences": differences_table(part),
        "figures": pictures_of(part),
        "settings_figures": against_settings(part),
        "spend_sentence": spend_sentence(part),
        "recalls": recall_by_class(part),
        "baseline": baseline_note(part),
        "score_warnings": score_warnings(part),
    }


def _cards(results: Results) -> Iterator[Card]:
    metric = results.metric
    baseline = next(variant for variant in results.variants if variant.name == results.baseline)
    majority = majority_of(baseline) if metric == "test_accuracy" else None
    share = "" if majority is None else f"; always one class: {metric_text(metric, majority)}"
    guarantee = ", without privacy"
    if baseline.is_private:
        guarantee = f"; {guarantee_text(baseline)} ({baseline.observer})"
    label, mean = f"{results.baseline}: {metric_words(metric)}", mean_text(results, baseline)
    yield Card(label, mean, f"the baseline{guarantee}{share}")
    others = [v for v in results.variants if v.epsilon is not None and v is not baseline]
    strongest = min(others, key=lambda variant: variant.epsilon or 0.0, default=None)
    if strongest is None:
        return
    label = f"{strongest.name} minus {results.baseline}"
    if names := [variant.name for variant in (baseline, strongest) if variant.unfit]:
        why = f"compare nothing with {' or '.join(names)}: see the note above"
        yield Card(label, "no fair comparison", why, "unfair")
    elif strongest.difference is not None:
        detail = (
            f"the smallest ε, {epsilon_text(strongest.epsilon)} ({strongest.observer}, unit "
            f"{strongest.unit}); ± is half a 95 % interval"
        )
        yield Card(label, difference_text(metric, strongest.difference.estimate), detail)


def _run_cards(results: Results) -> list[Card]:
    seconds = sum(run.seconds for run in results.outcomes)
    finished = sum(run.is_finished for run in results.outcomes)
    paired = "yes" if results.pair_check.is_paired else "in part"
    return [
        Card("Runs", f"{finished} of {len(results.outcomes)}", seeds_text(results)),
        Card("Paired", paired, "data, model, participants"),
        Card("Time", duration_text(seconds) if seconds else NOTHING, "total of all runs"),
    ]


def _guarantees(result: ComparisonResult) -> Iterator[tuple[str, str]]:
    """Yield (name, privacy statement of the run with the largest ε) of each private variant."""
    for variant in result.results.variants:
        runs = variant.finished_runs
        if variant.is_private and runs:
            worst = max(runs, key=lambda run: math.inf if run.epsilon is None else run.epsilon)
            privacy = RunDirectory(result.path / worst.path).read_json("privacy.json")
            yield variant.name, privacy["statement"]
