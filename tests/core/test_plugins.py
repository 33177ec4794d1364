import inspect
import pickle
import sys
from pathlib import Path

import pytest

from fedsim.core.plugins import PluginError, describe_error, resolve


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(reference: str, base: Path) -> str:
    with pytest.raises(PluginError) as caught:
        resolve(reference, base=base, setting="model.name")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"model.name {reference!r}: ")
    return message


def test_a_module_attribute_is_found(tmp_path):
    assert resolve("collections:OrderedDict.fromkeys", base=tmp_path, setting="x")("a") == {
        "a": None
    }


def test_a_file_is_found_relative_to_base_and_absolute(tmp_path):
    path = write(tmp_path, "def load():\n    return 3\n")
    assert resolve("./mine.py:load", base=tmp_path, setting="x")() == 3
    assert resolve("mine.py:load", base=tmp_path, setting="x")() == 3
    assert resolve(f"{path}:load", base=Path("/"), setting="x")() == 3


def test_a_file_loads_once_until_it_changes(tmp_path):
    write(tmp_path, "class Net:\n    version = 1\n")
    first = resolve("./mine.py:Net", base=tmp_path, setting="x")
    assert resolve("./mine.py:Net", base=tmp_path, setting="x") is first
    write(tmp_path, "class Net:\n    version = 2\n")  # same size, same second
    second = resolve("./mine.py:Net", base=tmp_path, setting="x")
    assert getattr(second, "version") == 2  # noqa: B009
    assert first is not second
    assert not (tmp_path / "__pycache__").exists()


def test_equal_files_in_two_places_are_two_modules(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "def load():\n    return __file__\n")
    found = [resolve("./mine.py:load", base=tmp_path / name, setting="x")() for name in "ab"]
    assert found == [str(tmp_path / name / "mine.py") for name in "ab"]


def test_objects_of_a_file_can_be_pickled_and_inspected(tmp_path):
    write(
        tmp_path,
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n",
    )
    point = resolve("./mine.py:Point", base=tmp_path, setting="x")
    assert pickle.loads(pickle.dumps(point(3))).x == 3
    assert "x: int" in inspect.getsource(point)


@pytest.mark.parametrize("reference", ["nothing", ":f", "module:", "./mine.py"])
def test_what_is_no_reference_is_refused_with_the_forms(reference, tmp_path):
    assert "package.module:callable or ./file.py:callable" in refusal(reference, tmp_path)


def test_missing_module_and_missing_dependency_read_differently(tmp_path, monkeypatch):
    assert "no module named 'absent_pkg'" in refusal("absent_pkg.data:load", tmp_path)
    assert "no module named 'json.absent'" in refusal("json.absent:load", tmp_path)
    write(tmp_path, "import absent_dependency\n", "needs_more.py")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal("needs_more:load", tmp_path)
    assert "ModuleNotFoundError: No module named 'absent_dependency'" in message
    assert "(needs_more.py, line 1)" in message


def test_missing_file_names_the_path(tmp_path):
    message = refusal("./absent.py:load", tmp_path)
    assert str(tmp_path / "absent.py") in message
    assert "relative to the experiment file" in message


def test_a_directory_is_not_a_file(tmp_path):
    (tmp_path / "folder.py").mkdir()
    assert "cannot read" in refusal("./folder.py:load", tmp_path)


def test_missing_attribute_suggests_the_nearest(tmp_path):
    write(tmp_path, "def load_data():\n    pass\n")
    assert "did you mean load_data?" in refusal("./mine.py:load_dat", tmp_path)
    assert "check the name" in refusal("./mine.py:zzz", tmp_path)


def test_what_cannot_be_called_is_refused(tmp_path):
    write(tmp_path, "load = 3\n")
    assert "load is not callable, it is a int" in refusal("./mine.py:load", tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nraise RuntimeError('two\\nlines')\n", "RuntimeError: two lines (mine.py, line 2)"),
        ("x = (\n", "SyntaxError: '(' was never closed (mine.py, line 1)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (mine.py, line 2)"),
        ("import json\njson.loads('{')\n", "(mine.py, line 2)"),
    ],
)
def test_a_file_that_raises_is_refused_with_type_message_and_line(text, expected, tmp_path):
    write(tmp_path, text)
    before = set(sys.modules)
    assert expected in refusal("./mine.py:load", tmp_path)
    assert not [name for name in set(sys.modules) - before if "mine" in name]


def test_describe_without_message_or_place():
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(ValueError("a\n b")) == "ValueError: a b"
