"""The decision records are complete, numbered, listed, and name files that exist."""

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.noise.release import release_

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "decisions"
INDEX = FOLDER / "README.md"
ROOMS = {"fedsim", "clients", "server", "accountant"}
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


def test_the_code_of_the_proofs_exists() -> None:
    text = (ROOT / "docs" / "explain" / "proofs.md").read_text(encoding="utf-8")
    paths = [path for path in paths_in(text) if path.endswith(".py")]
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_round_in_the_design_names_files_that_exist() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    (block,) = re.findall(r"## One round\n.*?```\n(.*?)```", design, re.DOTALL)
    named = [line.split()[0] for line in block.splitlines()]
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_round_in_the_design_is_the_call_stack_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    (block,) = re.findall(r"## One round\n.*?```\n(.*?)```", design, re.DOTALL)
    named = [line.split()[0] for line in block.splitlines() if line[0] != " "]
    stack: list[str] = []

    def release(*given: Any) -> None:
        frame = None if stack else sys._getframe()
        while frame is not None and stack[-1:] != named[:1]:
            path = Path(frame.f_code.co_filename).resolve()
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
                stack.append(path.relative_to(ROOT).as_posix())
            frame = frame.f_back
        release_(*given)

    monkeypatch.setattr("fedsim.runs.runner.probe_mechanisms", lambda federation: None)
    monkeypatch.setattr("fedsim.clients.mechanisms.dp_sgd.step.release_", release)
    short = {"federation.rounds": 1}
    fedsim.run(ROOT / "experiments" / "digits_dp.yaml", overrides=short, out=tmp_path / "run")
    assert len(stack) <= 12
    assert [file for file, _ in groupby(reversed(stack))] == named[:-1]
    assert named[-1] == "fedsim/noise/release.py"
