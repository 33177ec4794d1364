"""Appended lines and replaced files are whole on disk, and a chain's hash ignores the key order."""

import hashlib
from pathlib import Path

import pytest

from fedsim.core import durable


def test_appending_at_a_place_removes_what_a_crash_left_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntorn")
    with path.open("a+b") as file:
        durable.append(file, b"two\n", at=4)
        durable.append(file, b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_data_is_forced_to_disk_before_a_file_gets_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(durable.os, name)

        def step(*given: object, name: str = name, real: object = real) -> None:
            steps.append(name)
            real(*given)  # type: ignore[operator]

        monkeypatch.setattr(durable.os, name, step)
    durable.replace_file(tmp_path / "file", b"new")
    assert steps == ["fsync", "replace", "fsync"]
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_refused_replacement_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        durable.replace_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_digest_is_of_the_canonical_json() -> None:
    text = '{"a":[1,2.5],"b":"ε"}'.replace("ε", "\\u03b5")
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert durable.digest_of({"b": "ε", "a": [1, 2.5]}) == expected
    assert durable.digest_of({"a": [1, 2.5], "b": "ε"}) == expected
