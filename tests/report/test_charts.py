"""Charts are drawn where their axes say, with names apart, and the same in pages and in files."""

import math
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from fedsim.report.chart import (
    Axis,
    Chart,
    Dots,
    Line,
    Look,
    Mark,
    interval,
    number_axis,
    number_text,
    ticks,
)
from fedsim.report.drawing import ChartFigure, file_svg, inline_svg
from fedsim.report.plots import bounds_chart


def chart(*marks: Mark, **settings: object) -> Chart:
    """A chart with 100 pixels from 0 to 1 upwards, at 8 to 108, and 300 pixels from 1 to 1,000."""
    x = Axis(1.0, 1000.0, {}, logarithmic=True)
    return Chart("c", x, Axis(0.0, 1.0, {}), marks, width=313, height=100, **settings)  # type: ignore[arg-type]


def paths(text: str) -> list[str]:
    return re.findall(r' d="(.*?)"', text)


def test_equal_ratios_are_equal_distances_and_infinity_is_the_edge() -> None:
    line = Line([(1.0, 0.0), (10.0, 0.5), (100.0, math.nan), (1000.0, 1.0), (math.inf, -math.inf)])
    assert paths(inline_svg(chart(line)))[-1] == "M9.0 108.0L109.0 58.0M309.0 8.0L309.0 108.0"


def test_an_interval_has_caps_at_its_ends() -> None:
    dots = [mark for mark in interval(1.0, (0.2, 0.8), "accent") if isinstance(mark, Dots)]
    assert [dot.points for dot in dots] == [[(1.0, 0.2), (1.0, 0.8)]]
    assert len(paths(inline_svg(chart(*interval(1.0, (0.2, 0.8), "accent"))))) == 4  # and the axis


def test_names_stand_apart_in_the_order_of_their_lines() -> None:
    ends = [(f"n{index}", (1000.0, 0.5 + index / 1000), "accent") for index in range(4)]
    text = inline_svg(chart(names=ends))
    places = {name: float(y) for y, name in re.findall(r'y="([0-9.]+)".*?>(n\d)<', text)}
    heights = [places[f"n{index}"] for index in range(4)]
    assert sum(heights) / 4 == pytest.approx(58.0, abs=0.3)
    assert [low - high for low, high in pairwise(heights)] == pytest.approx([15.0] * 3, abs=0.2)


def test_each_point_has_the_strip_to_the_middle_of_its_neighbours() -> None:
    tips = [(1.0, "a"), (100.0, "<b>")]
    text = inline_svg(chart(tips=tips))
    strips = re.findall(r'x="([\d.]+)" y="8.0" width="([\d.]+)".*?<title>(.*?)<', text)
    assert strips == [("9.0", "100.0", "a"), ("109.0", "200.0", "&lt;b&gt;")]


def test_a_file_has_heading_and_legend_and_a_page_has_neither(tmp_path: Path) -> None:
    legend = {"$a$ & b": Look("series-1", "9 4", "D")}
    one = chart(heading="Do not\npublish.", legend=legend)
    assert "publish" not in inline_svg(one)
    root = ElementTree.fromstring(file_svg(one))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in words if text] == ["Do not", "publish.", "$a$ & b"]
    assert "var(" not in file_svg(one)
    for suffix in ("png", "pdf"):
        ChartFigure(one).save(tmp_path / f"c.{suffix}")
        assert (tmp_path / f"c.{suffix}").stat().st_size > 1000


def test_lines_without_a_finite_value_leave_an_empty_chart() -> None:
    bounds = (SimpleNamespace(label="none"), SimpleNamespace(label="not proved"))
    schedule = SimpleNamespace(text="q = 1")
    points = ((1, (None, 1.0)), (2, (math.inf, None)))
    curve = SimpleNamespace(bounds=bounds, points=points, last=points[-1][1], schedule=schedule)
    one = bounds_chart(curve)  # type: ignore[arg-type]
    assert (one.marks, one.names) == ([], [])
    assert "svg" in file_svg(one)


def test_marks_are_round_numbers() -> None:
    assert ticks(0.0, 0.31) == [0.0, 0.1, 0.2, 0.3]
    assert ticks(1, 7, 3, whole=True) == [2.0, 4.0, 6.0]
    assert ticks(5.0, 5.0) == [5.0]
    marks = number_axis((0.8, 30.0), logarithmic=True).marks
    assert list(marks.values()) == ["1", "2", "5", "10", "20"]
    assert list(number_axis((0.8, 3e5), logarithmic=True).marks)[-1] == 1e5
    assert number_axis((0.0, 0.1), percent=True, most=4).marks[0.025] == "2.5%"
    assert number_text(1.5e6) == "1.5e6"
