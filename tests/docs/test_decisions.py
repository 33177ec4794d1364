"""The decision records are complete, numbered, listed, and name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "decisions"
INDEX = FOLDER / "README.md"
pytestmark = pytest.mark.skipif(not INDEX.exists(), reason="reads the documents of a checkout")


def listed() -> dict[str, range]:
    """Return the record numbers of each page, as the index lists them."""
    rows = re.findall(r"^\| \[[^\]]+\]\((\w+\.md)\) \| (\d+) to (\d+):", INDEX.read_text(), re.M)
    return {page: range(int(first), int(last) + 1) for page, first, last in rows}


def test_every_page_is_listed_with_its_records() -> None:
    pages = {page.name for page in FOLDER.glob("*.md")} - {INDEX.name}
    assert set(listed()) == pages
    for page, numbers in listed().items():
        found = re.findall(r"^## (\d+)\. \S", (FOLDER / page).read_text(), re.M)
        assert [int(number) for number in found] == list(numbers), page
    every = [number for numbers in listed().values() for number in numbers]
    assert every == list(range(1, len(every) + 1))


def test_every_record_has_decision_reason_and_consequence() -> None:
    for page in listed():
        for record in (FOLDER / page).read_text().split("\n## ")[1:]:
            parts = re.findall(r"^\*\*(\w+)\.\*\* \S", record, re.M)
            assert parts == ["Decision", "Reason", "Consequence"], record.splitlines()[0]


def paths_in(text: str) -> list[str]:
    """Return what stands in backticks and looks like a path of the repository."""
    return re.findall(r"`((?:[\w-]+/)+(?:[\w-]+\.\w+)?)`", text)


@pytest.mark.parametrize("page", sorted(page.name for page in FOLDER.glob("*.md")))
def test_every_path_exists(page: str) -> None:
    paths = paths_in((FOLDER / page).read_text())
    assert paths or page == INDEX.name
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_round_in_the_design_names_files_that_exist() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    (block,) = re.findall(r"## One round\n\n```\n(.*?)```", design, re.DOTALL)
    named = [line.split()[0] for line in block.splitlines()]
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).exists()] == []
