"""The directory of a search: what may be handed on, what stays with the server, and its ledger.

`account/search.jsonl` is append-only and hash-chained. Each line is one record as JSON with sorted
keys and no spaces. `hash` is the SHA-256 of the line without it, `previous` the hash of the line
before, or 64 zeros.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fedsim.comparison.file.load import LoadedComparison
from fedsim.core.durable import GENESIS, append, digest_of, sync_directory
from fedsim.core.errors import name_file
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import SchemaError, check_schema
from fedsim.tools.search.records import FILE, RECORDS, Record, Search, SearchLedgerError, replay

PATH = f"account/{FILE}"


class SearchLedger:
    """The ledger of the searches in one directory, for one process at a time.

    Guarantee: when `append` returns, its record is on disk. A record that a crash cut short was
    followed by nothing; the next `append` removes its remains.

    Args:
        out: the directory of the searches.

    Raises:
        SearchLedgerError: a record was changed, does not continue the chain, or contradicts others.
        SchemaError: a record has another schema.
    """

    def __init__(self, out: Path) -> None:
        self._path = out / PATH
        self._records: list[Record] = []
        self._head, self._size = GENESIS, 0
        if self._path.exists():
            self._read()

    @property
    def searches(self) -> tuple[Search, ...]:
        """The searches of the directory, oldest first; all but the last have ended."""
        return replay(self._records)

    @property
    def head(self) -> str:
        """Hash of the last record."""
        return self._head

    def append(self, record: Record) -> None:
        """Write a record and force it to disk.

        Raises:
            SearchLedgerError: it contradicts the records before it; nothing was written.
        """
        replay([*self._records, record])
        line, digest = line_of(record, self._head)
        data = line.encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with name_file(self._path), self._path.open("a+b") as file:
            append(file, data, at=self._size)
        sync_directory(self._path.parent)
        sync_directory(self._path.parent.parent)
        self._records.append(record)
        self._head, self._size = digest, self._size + len(data)

    def _read(self) -> None:
        *lines, _unfinished = self._path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            where = f"{self._path}, line {number}"
            text = line.decode(errors="replace") + "\n"
            record, digest = _record_of(text, self._head, where, self._path)
            self._records.append(record)
            self._head, self._size = digest, self._size + len(line) + 1
        try:
            replay(self._records)
        except SearchLedgerError as error:
            raise SearchLedgerError(f"{self._path}: {error}") from error


def line_of(record: Record, previous: str) -> tuple[str, str]:
    """Return the line of a record and its hash.

    Args:
        record: the record.
        previous: hash of the record before it.
    """
    content = {**record.model_dump(mode="json", by_alias=True), "previous": previous}
    digest = digest_of(content)
    return _text({**content, "hash": digest}) + "\n", digest


def _record_of(line: str, head: str, where: str, path: Path) -> tuple[Record, str]:
    try:
        content: dict[str, Any] = json.loads(line)
        if content["record"] == "drawn":
            check_schema(path, content)
        _digest, previous = content.pop("hash"), content.pop("previous")
        record = RECORDS.validate_python(content)
        if record.record == "drawn":
            for charge in record.clients:
                _ = charge.events
    except SchemaError:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        what = "not a record" if isinstance(error, ValidationError) else f"not a record: {first}"
        raise SearchLedgerError(f"{where}: {what}") from error
    expected, digest = line_of(record, previous)
    if expected != line:
        raise SearchLedgerError(f"{where}: the record was changed after it was written")
    if previous != head:
        raise SearchLedgerError(f"{where}: the record does not continue the chain")
    return record, digest


def _text(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


MARKER = "search.yaml"
PUBLIC = "selected"
ACCOUNT = "account"
WORK = "account/work"


def check_search_directory(out: Path) -> None:
    """Check that a directory is new, empty, or one of searches.

    Raises:
        RunDirectoryError: it is none of these, or its ledger is missing.
    """
    if out.exists() and not out.is_dir():
        raise RunDirectoryError(f"{out} is a file; choose another --out")
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    known = (out / MARKER).is_file() or (out / PATH).is_file()
    if names - {f".{MARKER}.tmp"} and not known:  # which a crash may leave
        raise RunDirectoryError(f"{out} is not empty and holds no search; choose another --out")
    if (out / PUBLIC).exists() and not (out / PATH).is_file():
        raise RunDirectoryError(
            f"{out} holds selected models and no {PATH}, which says what they cost: restore it "
            "from a copy, or choose another --out"
        )


def write_marker(comparison: LoadedComparison, out: Path) -> None:
    """Write `search.yaml`: the settings of the search, which mark the directory.

    Args:
        comparison: the loaded file.
        out: the directory.
    """
    select = comparison.settings.select
    content = {
        "name": comparison.name,
        "base": str(comparison.base.absolute()),
        "select": None if select is None else select.model_dump(),
        "variants": {variant.name: dict(variant.changes) for variant in comparison.candidates},
    }
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    RunDirectory(out).write_text(MARKER, text)


def public_folder(out: Path, search: int) -> Path:
    """Return the folder of a selected model, which may be handed on."""
    return out / PUBLIC / f"search-{search}"


def run_folder(out: Path, search: int, run: int) -> Path:
    """Return the folder of a run while the search lasts."""
    return out / WORK / f"search-{search}" / f"run-{run}"


def destroy_runs(out: Path) -> None:
    """Remove all runs and the log of their processes; when this returns, they are gone.

    The names are removed. What a disk keeps of removed files is beyond this program.
    """
    if (out / WORK).exists():
        shutil.rmtree(out / WORK)
        sync_directory(out / ACCOUNT)
