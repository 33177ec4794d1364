"""Every example in a docstring runs and prints what it shows."""

import ast
import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("accountant", "clients", "fedsim", "server")


def modules_with_examples() -> list[str]:
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    names = [
        path.relative_to(ROOT).with_suffix("").parts for path in paths if ">>>" in path.read_text()
    ]
    return [".".join(name if name[0] == "fedsim" else ("fedsim", *name)) for name in names]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_print_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(import_module(name))
    assert tried
    assert not failed


def test_what_a_user_calls_has_an_example() -> None:
    texts = [path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    counted = 0
    for text in texts:
        for node in ast.walk(ast.parse(text)) if ">>>" in text else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                counted += ">>>" in (ast.get_docstring(node) or "")
    assert counted >= 50
