"""The glossary is sorted, links to its terms lead to terms, and its names are those of the code."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedsim.cli import cli
from fedsim.comparison.settings import ComparisonSettings
from fedsim.experiment import json_schema

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "reference" / "glossary.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")


def terms() -> dict[str, str]:
    """Return each term with its text."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    return {row[0]: " Names: ".join(row[1:]) for row in rows if len(row) == 3 and row[0] != "term"}


def test_terms_are_sorted_and_none_is_missing_its_text() -> None:
    names = list(terms())
    assert len(names) > 40
    assert names == sorted(names, key=str.casefold)
    for term, text in terms().items():
        assert " Names: `" in text, term
        assert len(re.findall(r"[.;:] ", text)) <= 4, f"{term}: too long"


def keys_of(schema: dict[str, Any]) -> set[str]:
    """Return the names of all properties anywhere in a schema."""
    sections = [schema, *schema["$defs"].values()]
    return {name for section in sections for name in section.get("properties", {})}


def test_every_name_is_one_of_the_code_or_of_a_file() -> None:
    rooms = ("fedsim", "clients", "server", "accountant")
    source = "\n".join(path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    schema: dict[str, Any] = json_schema()
    keys = keys_of(schema) | keys_of(ComparisonSettings.model_json_schema())
    for term, text in terms().items():
        for name in re.findall(r"`([^`]+)`", text.split(" Names: ")[1]):
            if name.startswith("fedsim "):
                assert name.split()[1] in cli.commands, f"{term}: {name}"
            elif "." in name:
                assert set(name.split(".")) <= keys, f"{term}: {name}"
            elif not name.endswith("/"):
                assert name in words, f"{term}: {name}"
