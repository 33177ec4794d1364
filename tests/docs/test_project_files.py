"""CHANGELOG, CITATION and the pre-commit hooks agree with the project."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("fedsim", "clients", "server", "accountant")
pytestmark = pytest.mark.skipif(
    not (ROOT / "CHANGELOG.md").exists(), reason="reads the files of a checkout"
)


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_changelog_begins_with_this_version_and_its_privacy() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first = text.split("\n## ")[1]
    assert first.split("\n")[0] == version()
    assert "\n### Privacy\n" in first


def test_renamed_names_are_gone_and_new_names_exist() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    source = "\n".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    defined = set(re.findall(r"^ *(?:class|def) (\w+)", source, re.M))
    rows = re.findall(r"^\| (`.+`) \| `([\w.]+)` \|$", text, re.M)
    assert len(rows) >= 10
    for old, new in rows:
        assert new.rsplit(".", 1)[-1] in defined, new
        for name in re.findall(r"`(\w+)`", old):
            assert f"class {name}(" not in source, name
            assert f"class {name}:" not in source, name


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == version()
    assert citation["authors"] == [{"name": "The fedsim developers"}]


def test_hooks_are_local_and_are_the_checks_of_ci() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "pyright", "language"]
    assert hooks[-1]["entry"] == "python docs/check_language.py"  # test_language.py runs it
    assert {hook["language"] for hook in hooks} == {"system"}
    ci = (ROOT / ".ci" / "run").read_text()
    for command in ("ruff check", "ruff format --check", "pyright"):
        assert command in ci
        assert any(hook["entry"].startswith(command) for hook in hooks)


def test_the_container_runs_the_first_command_of_the_readme() -> None:
    first = re.search(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.M)
    assert first is not None
    *install, run = first[0].split(" && ")
    lines = (ROOT / "Containerfile").read_text().splitlines()
    assert f"RUN {' && '.join(install)}" in lines
    assert lines[-2:] == [
        'ENTRYPOINT ["/fedsim/.venv/bin/fedsim"]',
        f"CMD {json.dumps(run.split()[1:])}",
    ]
