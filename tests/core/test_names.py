"""Hints on misspelled names come from one place."""

from pathlib import Path

import fedsim
from fedsim.core.names import closest_hint

ROOT = Path(fedsim.__file__).resolve().parents[1]


def test_one_module_decides_which_name_is_close() -> None:
    rooms = ("fedsim", "clients", "server", "accountant")
    texts = {path: path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py")}
    assert [path.name for path, text in texts.items() if "difflib" in text] == ["names.py"]
    makers = [path.name for path, text in texts.items() if "def unknown_name(" in text]
    assert makers == ["file_names.py"]


def test_a_hint_is_the_closest_name_or_what_the_caller_knows() -> None:
    known = ["mlp", "resnet18"]
    assert closest_hint("resnet81", known, "none") == "did you mean 'resnet18'?"
    assert closest_hint("resnet81", known, "none", quotes=False) == "did you mean resnet18?"
    assert closest_hint("tree", known, "built in: mlp") == "built in: mlp"
