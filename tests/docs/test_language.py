"""Pages and code keep the rules of docs/style.md that a regular expression can check."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "docs" / "check_language.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="reads the documents of a checkout")


@pytest.fixture(scope="module")
def check() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_no_page_and_no_module_has_a_phrase_that_the_style_rules_out(check: dict[str, Any]) -> None:
    found = [problem for path in check["all_files"]() for problem in check["problems"](path)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "finds"),
    [
        ("Each lot is charged.", 1),
        ("Each `lot` is charged, see [the page](lot.md).", 0),
        ("```console\na lot; of; output\n```", 0),
        ("Whoever sees the sum; it is noisy; it is charged.", 2),
        ("The table below shows\nwhat came of it.", 1),
        ("| a; b | c; d |", 0),
    ],
)
def test_the_check_sees_what_it_should(
    check: dict[str, Any], tmp_path: Path, text: str, finds: int
) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(text)
    check["problems"].__globals__["ROOT"] = tmp_path
    found = list(check["problems"](page))
    check["problems"].__globals__["ROOT"] = ROOT
    assert len(found) == finds, found
