"""docs/moved.md leads from modules that are gone to modules that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "moved.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")


def test_every_module_moved_from_where_nothing_is_to_where_something_is() -> None:
    whole, names = PAGE.read_text().split("\n## ")[1:3]
    moves = re.findall(r"^\| `([\w/]+\.py)` \| `([\w/]+\.py)` \|$", whole, re.M)
    assert len(moves) > 100
    assert [new for _, new in moves if not (ROOT / new).is_file()] == []
    assert [old for old, _ in moves if (ROOT / old).is_file()] == []
    assert len({new for _, new in moves}) == len(moves)
    assert names.startswith("Classes and functions")


def test_every_name_that_moved_is_defined_in_its_new_module() -> None:
    rows = re.findall(r"^\| `[\w/]+\.py` \| (.+) \| `([\w/]+\.py)` \|$", PAGE.read_text(), re.M)
    assert len(rows) > 5
    for names, path in rows:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class|def) {name}\b", text, re.M), f"{path}: {name}"
