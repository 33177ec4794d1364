"""The metric against a varied setting: found in the settings, drawn with intervals, and as CSV."""

import csv
import io
from collections.abc import Mapping
from dataclasses import replace

import pytest

from fedsim.comparison.comparison_result import ComparisonResult, write_figures
from fedsim.comparison.differences import settings_table
from fedsim.comparison.figures.settings import (
    against_settings,
    find_sweeps,
    is_geometric,
    number_of,
)
from fedsim.comparison.page import render_comparison
from fedsim.comparison.results import Results
from fedsim.comparison.statistics import t_interval
from fedsim.report.chart import Line
from fedsim.report.drawing import file_svg

LR, WIDTH, NAME = "local.optimizer.lr", "model.args.hidden", "local.optimizer.name"


def results_of(
    compared: ComparisonResult, settings: Mapping[str, Mapping[str, object]], means: list[float]
) -> Results:
    """Results of variants with these settings; `plain` is without privacy."""
    template = next(one for one in compared.results.variants if one.is_private)
    variants = tuple(
        replace(
            template,
            name=name,
            outcomes=tuple(
                replace(run, metrics={"test_accuracy": value}, is_private=name != "plain")
                for run, value in zip(template.outcomes, [mean - 0.01, mean + 0.01], strict=True)
            ),
        )
        for name, mean in zip(settings, means, strict=True)
    )
    first = next(iter(settings))
    table = settings_table(settings)
    return replace(compared.results, variants=variants, settings=table, baseline=first)


def one_at_a_time(compared: ComparisonResult) -> Results:
    base = {LR: 1.0, WIDTH: [32], NAME: "sgd"}
    settings = {
        "dp": base,
        "dp-lr=4": {**base, LR: 4.0},
        "dp-lr=2": {**base, LR: 2},
        "dp-hidden=8": {**base, WIDTH: [8]},
        "other": {**base, LR: 2.0, WIDTH: [8]},
    }
    return results_of(compared, settings, [0.8, 0.7, 0.9, 0.5, 0.2])


def test_a_line_has_the_variants_that_differ_in_one_setting_alone(
    compared: ComparisonResult,
) -> None:
    by = {sweep.key: sweep for sweep in find_sweeps(one_at_a_time(compared))}
    assert set(by) == {LR, WIDTH}
    names = [[one.name for _, one in points] for _, points in by[LR].lines]
    assert names == [["dp", "dp-lr=2", "dp-lr=4"], ["dp-hidden=8", "other"]]
    assert [name for name, _ in by[LR].lines] == ["hidden=32", "hidden=8"]
    assert by[LR].places == {"1": 1.0, "2": 2.0, "4": 4.0}
    assert by[LR].is_numeric
    assert is_geometric([*by[LR].places.values()])
    assert list(by[WIDTH].places.values()) == [8.0, 32.0]


def test_the_figure_and_its_csv_have_the_means_with_their_intervals(
    compared: ComparisonResult,
) -> None:
    results = one_at_a_time(compared)
    (lr, _) = against_settings(results)
    rows = list(csv.DictReader(io.StringIO(lr.to_csv())))
    assert [row["variant"] for row in rows[:3]] == ["dp", "dp-lr=2", "dp-lr=4"]
    expected = t_interval([0.89, 0.91])
    assert float(rows[1]["mean"]) == pytest.approx(0.9)
    assert (float(rows[1]["low"]), float(rows[1]["high"])) == pytest.approx(
        (expected.low, expected.high)
    )
    assert lr.chart.x.logarithmic
    assert dict(lr.chart.x.marks) == {1.0: "1", 2.0: "2", 4.0: "4"}
    line = next(mark for mark in lr.chart.marks if isinstance(mark, Line))
    assert [y for _, y in line.points] == pytest.approx([0.8, 0.9, 0.7])


def test_page_and_folder_have_the_figures(compared: ComparisonResult, tmp_path: object) -> None:
    results = one_at_a_time(compared)
    page = render_comparison(replace(compared, results=results))
    assert "Effect of each setting" in page
    assert 'href="figures/against-lr.csv"' in page
    assert 'href="figures/against-hidden.svg"' in page
    write_figures(results, tmp_path)  # type: ignore[arg-type]
    text = (tmp_path / "figures" / "against-lr.svg").read_text()  # type: ignore[operator]
    assert "local.optimizer.lr" in text
    assert "hidden=32" in text
    assert "Effect of each setting" not in render_comparison(compared)


def test_a_variant_without_privacy_is_a_level_and_no_point(compared: ComparisonResult) -> None:
    settings = {
        "dp": {"privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3},
        "dp-2": {"privacy.noise_multiplier": 2.0, "privacy.delta": 1e-3},
        "plain": {"privacy": None},
    }
    results = results_of(compared, settings, [0.6, 0.5, 0.9])
    (picture,) = against_settings(results)
    assert "plain" not in picture.to_csv()
    assert "plain 90.0%" in file_svg(picture.chart)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.25, 0.5, 1.0, 2.0), True),
        ((1.0, 2.0, 5.0, 10.0), True),
        ((10.0, 20.0, 30.0, 40.0), False),
        ((1.0, 2.0, 3.0), False),
        ((0.0, 1.0, 10.0), False),
        ((1.0, 100.0), False),
    ],
)
def test_values_with_equal_ratios_are_geometric(numbers: tuple[float, ...], expected: bool) -> None:
    assert is_geometric(numbers) is expected


def test_words_need_three_values_and_are_no_path(compared: ComparisonResult) -> None:
    def results(*values: str) -> Results:
        settings = {f"v{i}": {NAME: value} for i, value in enumerate(values)}
        return results_of(compared, settings, [0.5] * len(values))

    assert find_sweeps(results("sgd", "adam")) == ()
    (sweep,) = find_sweeps(results("sgd", "adam", "adamw"))
    assert (sweep.is_numeric, list(sweep.places.values())) == (False, [0.0, 1.0, 2.0])
    assert number_of(True) is None
    assert number_of([64]) == 64.0
