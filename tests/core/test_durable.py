"""Appended lines and replaced files are whole on disk, and a chain's hash ignores the key order."""

import hashlib
from pathlib import Path

import pytest

from fedsim.core import durable
from fedsim.core.errors import StorageError


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


def chained(path: Path, *records: dict[str, object]) -> durable.ChainedFile:
    file = durable.ChainedFile(path, raises=StorageError)
    for record in records:
        file.append(record)
    return file


def test_a_chain_is_read_back_and_goes_on_after_a_record_that_a_crash_cut_short(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chain"
    written = chained(path, {"b": 1.0, "a": "ε"}, {"a": 2})
    with path.open("ab") as file:
        file.write(b'{"a":3,"hash":')
    found = chained(path, {"a": 4})
    assert found.records == [*written.records, {"a": 4}] == chained(path).records
    assert found.heads[:3] == [durable.GENESIS, *written.heads[1:]]
    *_, last = path.read_text().splitlines()
    assert last.startswith(f'{{"a":4,"hash":"{found.heads[-1]}","previous":"{found.heads[-2]}"')


def test_a_changed_moved_or_missing_record_of_a_chain_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chain"
    chained(path, {"a": 1}, {"a": 2}, {"a": 3})
    first, second, third = path.read_bytes().splitlines(keepends=True)
    changed, continued = "line 2: the record was changed", "does not continue the chain"
    for lines, what in (
        ([first, second.replace(b'"a":2', b'"a":4'), third], changed),
        ([first, second.replace(b'"a":2', b'"a": 2'), third], changed),
        ([second, third], f"line 1: the record {continued}"),
        ([first, third], f"line 2: the record {continued}"),
        ([first, first], f"line 2: the record {continued}"),
        ([first, b"[1]\n"], "line 2: not a record"),
        ([first, b"[" * 100_000 + b"\n"], "line 2: not a record"),
        ([first, b"\xff\n"], "line 2: not a record"),
    ):
        path.write_bytes(b"".join(lines))
        with pytest.raises(StorageError, match=what):
            chained(path)
