"""Every figure has its numbers: as SVG of its own, as CSV, and within the metric's bounds."""

import csv
import io
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.figures import Picture
from fedsim.comparison.figures.variants import (
    fairness,
    metric_boxes,
    pictures_of,
    spend_boxes,
    spend_sentence,
    tradeoff,
)
from fedsim.comparison.results import Results
from fedsim.report.chart import Dots
from fedsim.report.drawing import file_svg


def over_rounds(results: Results) -> Picture | None:
    return pictures_of(results)["rounds"]


def table(picture: Picture | None) -> list[dict[str, str]]:
    assert picture is not None
    return list(csv.DictReader(io.StringIO(picture.to_csv())))


def with_accuracies(results: Results, *by_seed: list[float]) -> Results:
    """The results with other accuracies after each round, the same for every variant."""
    variants = tuple(
        replace(
            one,
            outcomes=tuple(
                replace(
                    run,
                    rounds=tuple(
                        {**row, "test_accuracy": value}
                        for row, value in zip(run.rounds, values, strict=False)
                    ),
                )
                for run, values in zip(one.outcomes, by_seed, strict=True)
            ),
        )
        for one in results.variants
    )
    return replace(results, variants=variants)


def test_the_files_of_the_comparison_are_its_figures(compared: ComparisonResult) -> None:
    names = {"tradeoff", "rounds", "over-epsilon", "private-clients", "private-client-boxes"}
    found = {path.name for path in (compared.path / "figures").iterdir()}
    assert found == {f"{name}.{kind}" for name in names for kind in ("svg", "csv")}
    page = (compared.path / "comparison.html").read_text()
    assert all(f'href="figures/{name}"' in page for name in found)


def test_a_file_stands_alone_in_colours_of_its_own_with_a_legend(
    compared: ComparisonResult,
) -> None:
    for path in (compared.path / "figures").glob("*.svg"):
        text = path.read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "var(--" not in text
        assert "fill: #ffffff" in text
        for name in ("plain", "dp"):
            assert f">{name}</text>" in text or path.name == "over-epsilon.svg"


def test_bands_are_t_intervals_over_the_seeds(compared: ComparisonResult) -> None:
    rows = table(over_rounds(with_accuracies(compared.results, [0.50, 0.60], [0.51, 0.63])))
    last = next(row for row in rows if (row["variant"], row["round"]) == ("dp", "2"))
    expected = stats.t.interval(0.95, 1, np.mean([0.60, 0.63]), stats.sem([0.60, 0.63]))
    assert [float(last["low"]), float(last["high"])] == pytest.approx(list(expected))
    assert (float(last["mean"]), last["n"]) == (pytest.approx(0.615), "2")


def test_bands_end_at_what_the_metric_can_be(compared: ComparisonResult) -> None:
    results = with_accuracies(compared.results, [0.90, 0.02], [1.00, 0.10])
    for name in ("rounds", "over_epsilon"):
        picture = pictures_of(results)[name]
        rows = table(picture)
        assert max(float(row["high"]) for row in rows) == 1.0
        assert min(float(row["low"]) for row in rows) == 0.0
    picture = over_rounds(results)
    assert picture is not None
    assert "110%" not in file_svg(picture.chart)


def test_a_caption_keeps_the_letters_of_a_metric(compared: ComparisonResult) -> None:
    runs = [
        replace(run, rounds=tuple({**row, "test_r2": 0.5} for row in run.rounds))
        for run in compared.results.variants[0].outcomes
    ]
    plain = replace(compared.results.variants[0], outcomes=tuple(runs))
    picture = over_rounds(replace(compared.results, metric="test_r2", variants=(plain,)))
    assert picture is not None
    assert picture.caption.startswith("Test R² over the rounds")


def test_one_seed_has_no_band_and_no_interval(compared: ComparisonResult) -> None:
    variants = tuple(replace(one, outcomes=one.outcomes[:1]) for one in compared.results.variants)
    rows = table(over_rounds(replace(compared.results, variants=variants)))
    assert {(row["low"], row["high"], row["n"]) for row in rows} == {("", "", "1")}


def test_boxes_are_the_quartiles_of_the_clients(compared: ComparisonResult) -> None:
    rows = table(metric_boxes(compared.results, "client_accuracy"))
    values = [
        row["client_accuracy"]
        for run in compared.results.variants[1].outcomes
        for row in run.client_metrics
    ]
    dp = next(row for row in rows if row["variant"] == "dp")
    names = ("minimum", "quartile_1", "median", "quartile_3", "maximum")
    assert [float(dp[name]) for name in names] == pytest.approx(
        list(np.percentile(values, [0, 25, 50, 75, 100]))
    )
    assert dp["clients"] == "6"


def test_equal_spends_are_words_and_others_are_boxes(compared: ComparisonResult) -> None:
    assert spend_boxes(compared.results) is None
    assert spend_sentence(compared.results) == "In each variant all clients have the same ε."
    plain, dp = compared.results.variants
    runs = tuple(
        replace(run, clients=tuple({**row, "epsilon": 1.0 + row["client"]} for row in run.clients))
        for run in dp.outcomes
    )
    results = replace(compared.results, variants=(plain, replace(dp, outcomes=runs)))
    (row,) = table(spend_boxes(results))
    assert (row["variant"], row["minimum"], row["maximum"]) == ("dp", "1.0", "3.0")


def test_variants_of_one_epsilon_stand_side_by_side(compared: ComparisonResult) -> None:
    plain, dp = compared.results.variants
    other = replace(dp, name="dp-2")
    picture = tradeoff(replace(compared.results, variants=(plain, dp, other)))
    assert [row["epsilon"] for row in table(picture)][1:] == [str(dp.epsilon)] * 2
    assert picture is not None
    dots = [mark for mark in picture.chart.marks if isinstance(mark, Dots) and mark.tips]
    assert len({x for dot in dots for x, _ in dot.points}) == 2


def test_a_client_that_spent_nothing_stands_at_the_edge(compared: ComparisonResult) -> None:
    dp = compared.results.variants[1]
    runs = tuple(
        replace(run, clients=tuple({**row, "epsilon": float(row["client"])} for row in run.clients))
        for run in dp.outcomes
    )
    results = replace(compared.results, variants=(replace(dp, outcomes=runs),))
    picture = fairness(results, "client_accuracy")
    assert picture is not None
    (dots,) = picture.chart.marks
    assert isinstance(dots, Dots)
    assert {x for x, _ in dots.points} == {-np.inf, 1.0, 2.0}
    assert {row["epsilon"] for row in table(picture)} == {"0.0", "1.0", "2.0"}
    assert "nan" not in file_svg(picture.chart)


def test_files_of_private_figures_say_so(compared: ComparisonResult) -> None:
    private = {path.name for path in (compared.path / "figures").glob("private-*.svg")}
    for path in (compared.path / "figures").glob("*.svg"):
        marked = ">Private figures: no ε covers them. Do not publish.<" in path.read_text()
        assert marked == (path.name in private)
    assert len(private) == 2
