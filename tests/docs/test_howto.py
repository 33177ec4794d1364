"""Every page of docs/start and docs/howto is run from its first line to its last."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ELSEWHERE = {
    "start/tutorial.md",  # test_tutorial.py
    "howto/deployment.md",  # tests/tools/deployment/test_recipe.py
}
SHOWN = (  # pages without a command that is run
    "arms.md",  # tests/experiments/test_compare_arms.py
    "personalization.md",
    "correlated_noise.md",
    "own_loop.md",
    "users.md",
)
PAGES = sorted(
    f"{folder}/{path.name}"
    for folder in ("howto", "start")
    for path in (ROOT / "docs" / folder).glob("*.md")
    if f"{folder}/{path.name}" not in ELSEWHERE and path.name not in SHOWN
)
LONG = ("howto/accuracy.md",)  # 25 runs; tests/experiments/test_accuracy.py has some
NEEDS = {"howto/ray.md": "ray", "howto/recompute_epsilon.md": "dp_accounting"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.slow)
        for name in PAGES
    ],
)
def test_a_page_prints_what_it_shows(run_page: Callable[[str], None], name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    run_page(f"docs/{name}")


@pytest.mark.parametrize("name", ["from_flower.md", "from_opacus.md"])
def test_from_another_library_to_an_experiment_are_ten_changed_lines(name: str) -> None:
    page = (ROOT / "docs" / "start" / name).read_text(encoding="utf-8")
    diffs = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    changed = re.findall(r"^[-+](?!-- |\+\+ ).*$", "\n".join(diffs), re.MULTILINE)
    assert 5 <= len(changed) <= 10, changed


def test_every_link_between_documents_leads_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken
    assert len(PAGES) > 20
