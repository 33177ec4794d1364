"""Every how-to is run from its first line to its last."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(path.name for path in (ROOT / "docs" / "howto").glob("*.md"))
LONG = ("accuracy.md",)  # 25 runs; tests/experiments/test_accuracy.py has some
NEEDS = {"ray.md": "ray", "recompute_epsilon.md": "dp_accounting"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.slow)
        for name in PAGES
    ],
)
def test_a_how_to_prints_what_it_shows(run_page: Callable[[str], None], name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    run_page(f"docs/howto/{name}")


def test_every_link_between_documents_leads_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken
    assert PAGES
