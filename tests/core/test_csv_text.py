"""A spreadsheet runs no cell of a CSV that fedsim writes."""

import csv
import io

import pytest

from fedsim.core.text_formats import csv_text


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\tx", "\r=1"])
def test_text_that_is_a_formula_gets_an_apostrophe_also_as_a_heading(text: str) -> None:
    heading, cell = csv.reader(io.StringIO(csv_text([text], [[text]]), newline=""))
    assert heading == cell == [f"'{text}"]


def test_numbers_stay_numbers_also_as_text() -> None:
    row = [-1, -0.5, None, "-1", "+2.5", "-1e-9", "-inf", "north", "a=b", "'"]
    text = csv_text(["x"] * len(row), [row])
    assert text.splitlines()[1] == "-1,-0.5,,-1,+2.5,-1e-9,-inf,north,a=b,'"
