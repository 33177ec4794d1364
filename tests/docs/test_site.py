"""The documentation site has every page, needs no network, and is built by .ci/run."""

import re
import tomllib
from pathlib import Path

import pytest

import fedsim

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(
    not (DOCS / "index.md").exists(), reason="reads the documents of a checkout"
)


def listed_by(page: Path) -> set[Path]:
    """Return the pages to which a page of contents links; docs/conf.py makes the menu of them."""
    names = re.findall(r"\]\(([\w/]+\.(?:md|ipynb))\)", page.read_text())
    assert len(names) == len(set(names))
    return {page.parent / name for name in names}


OF_DEVELOPERS = {DOCS / name for name in ("design.md", "style.md")}


def test_every_page_of_users_is_in_the_table_of_contents_once() -> None:
    listed = listed_by(DOCS / "index.md")
    found = (*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb"))
    pages = {page for page in found if not {"_build", "decisions"} & set(page.parts)}
    assert pages == listed | OF_DEVELOPERS | {DOCS / "index.md"}
    decisions = listed_by(DOCS / "decisions" / "README.md")
    assert decisions == {*(DOCS / "decisions").glob("*.md")} - {DOCS / "decisions" / "README.md"}
    assert not decisions & listed


def test_the_site_is_built_with_warnings_as_errors_and_not_committed() -> None:
    assert "-m sphinx -W --keep-going -q docs docs/_build" in (ROOT / ".ci" / "run").read_text()
    assert "/docs/_build/" in (ROOT / ".gitignore").read_text().splitlines()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert "python -m sphinx -W --keep-going -q docs docs/_build" in contributing


def test_the_exact_versions_of_the_tools_are_known() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").open()}
    for requirement in extras["optional-dependencies"]["docs"]:
        assert re.split(r"[><=]", requirement)[0] in pinned


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    text = (DOCS / "reference" / "api" / "fedsim.md").read_text()
    documented = set(re.findall(r"auto(?:function|class|module):: [\w.]*\.(\w+)$", text, re.M))
    documented |= {"FedsimError"}  # in fedsim.core.errors
    modules = set(re.findall(r"\[`fedsim\.(\w+)`\]", text))
    assert set(fedsim.__all__) - {"__version__"} <= documented | modules
