"""The page of a comparison in a real browser: on a desk, a phone and paper, light and dark."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.comparison.compare import compare_runs

pytestmark = pytest.mark.slow

EXPERIMENT: dict[str, Any] = {
    "name": "compared",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 3},
    "local": {"steps": 2, "batch_size": 32},
    "privacy": {"target_epsilon": 4.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
DESK, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
SCREENS = [(size, dark) for size in (DESK, PHONE) for dark in (False, True)]

OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a comparison of runs."""
    out = tmp_path_factory.mktemp("compared")
    runs = [
        fedsim.run({**EXPERIMENT, **changes, "seed": seed}, out=out / f"{name}-{seed}").path
        for name, changes in (("private", {}), ("plain", {"privacy": None}))
        for seed in (7, 8)
    ]
    return compare_runs(runs, out=out / "out").path


@pytest.mark.parametrize(("size", "dark"), SCREENS)
def test_the_page_fits_the_screen_and_loads_nothing(
    comparison: Path, open_page: OpenPage, size: dict[str, int], dark: bool
) -> None:
    page = open_page(comparison / "comparison.html", **size, dark=dark)
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    widths = page.js(
        "[...document.querySelectorAll('svg')].map((e) => e.getBoundingClientRect().right)"
    )
    assert len(widths) >= 3
    assert max(widths) <= size["width"]
    assert page.requests == [(comparison / "comparison.html").as_uri()]
    assert page.complaints == []
    body = page.js("getComputedStyle(document.body).backgroundColor")
    assert body == ("rgb(20, 23, 26)" if dark else "rgb(253, 253, 252)")


def test_a_phone_shows_the_guarantee_and_the_metric_first(
    comparison: Path, open_page: OpenPage
) -> None:
    page = open_page(comparison / "comparison.html", **PHONE)
    assert page.texts("table.results:first-of-type thead th")[:3] == [
        "variant",
        "guarantee",
        "test accuracy",
    ]
    right = "document.querySelectorAll('table.results thead th')[{}].getBoundingClientRect().right"
    assert page.js(right.format(1)) < PHONE["width"]


def test_the_drawings_take_the_colours_of_the_page(comparison: Path, open_page: OpenPage) -> None:
    colours = []
    for dark in (False, True):
        page = open_page(comparison / "comparison.html", **DESK, dark=dark)
        swatch = "getComputedStyle(document.querySelector('.swatch')).backgroundColor"
        line = "[...document.querySelectorAll('svg path')].map((e) => getComputedStyle(e).stroke)"
        assert page.js(swatch) in page.js(line)
        colours.append(page.js(swatch))
    assert colours[0] != colours[1]


def test_paper_has_every_part_in_dark_ink_and_no_links_to_files(
    comparison: Path, open_page: OpenPage
) -> None:
    page = open_page(comparison / "comparison.html", **DESK, dark=True)
    folded = "[...document.querySelectorAll('details table, details pre')]"
    runs = f"{folded}.map((e) => e.checkVisibility())"
    assert page.js(runs) == [False, False]
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.js(runs) == [True, True]
    assert page.js("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    assert page.js("getComputedStyle(document.querySelector('.files')).display") == "none"
    assert page.pdf().startswith(b"%PDF")


def test_a_figure_opens_alone(comparison: Path, open_page: OpenPage) -> None:
    for path in sorted((comparison / "figures").glob("*.svg")):
        page = open_page(path, **DESK)
        assert page.js("document.documentElement.tagName") == "svg"
        assert page.js("document.documentElement.getBoundingClientRect().width") > 300
        assert page.complaints == []
