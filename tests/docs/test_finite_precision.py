"""Every number of one client in proofs.md is computed here; tests/noise/test_law.py proves."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.accountant import sampler_slack as slack_module
from fedsim.accountant.sampler_slack import MAX_DRAWS, SHARE, sampler_slack
from fedsim.noise.sources import DEVIATION, SATURATION
from fedsim.noise.spline import EXTENSION_BITS, INDEX_BITS, MAX_CENTRE, WORD_BITS

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "explain" / "proofs.md"
RowsOf = Callable[[Path, str], list[list[str]]]
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")


def test_the_slack_at_several_epsilons(rows_of: RowsOf) -> None:
    head, *rows = rows_of(PAGE, "ε")
    deltas = [float(cell.rpartition("= ")[2]) for cell in head[1:]]
    assert len(rows) == 5
    for epsilon, *cells in rows:
        for delta, cell in zip(deltas, cells, strict=True):
            slack = sampler_slack(float(epsilon), delta).epsilon
            if cell == "infinite":
                assert slack == math.inf
            else:
                assert math.expm1(slack / 2) < 5e-5 < SHARE
                assert slack <= float(cell) * (1 + 1e-9) < slack + 1.1e-6


def test_the_constants_are_those_of_the_code(rows_of: RowsOf) -> None:
    found = {row[0]: row[2] for row in rows_of(PAGE, "constant")[1:]}
    assert found == {
        "steps of the grid in a deviation": "2²⁴",
        "E ℓ²": "1e-23",
        r"max \|ℓ\|": "5e-8",
        "outside of ±4093 · 2¹⁶, table included": "2⁻¹⁸⁷",
        "rounding of the table": "",
        "draws of a client": "10¹²",
        "share of δ": "2⁻¹⁴",
    }
    assert (DEVIATION, SATURATION, MAX_DRAWS, SHARE) == (2**24, 2**51, 10**12, 2**-14)
    assert slack_module._MEAN_SQUARE == 1e-23
    assert slack_module._MAX_LOG_RATIO == 5e-8
    assert slack_module._OUTSIDE == 2**-187
    assert slack_module._FAILURE_SHARE == 2**-18
    assert (MAX_CENTRE, INDEX_BITS, WORD_BITS, EXTENSION_BITS) == (4095, 13, 19, 192)
    assert INDEX_BITS + WORD_BITS + EXTENSION_BITS == 224


def test_where_nothing_is_proven() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    (limits,) = re.findall(r"ε above (\d+) at δ = (\S+), or above (\d+) at δ = (\S+)\. ", text)
    for epsilon, delta in (limits[:2], limits[2:]):
        assert sampler_slack(float(epsilon), float(delta)).epsilon < math.inf
        assert sampler_slack(float(epsilon) + 1, float(delta)).epsilon == math.inf
