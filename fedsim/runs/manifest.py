"""The file `manifest.json`: a digest of every file of an ended run, and one digest of all records.

The records are the files that say what ran and what was spent. `root` is the digest of all records,
which a user can sign or keep elsewhere: a forger can change the manifest together with the files,
and only a root that was kept shows it. Pages, such as `report.html`, are made from the records and
can be written again, so they are listed separately and do not change the root.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import scandir
from pathlib import Path, PurePosixPath
from typing import Any

from fedsim.core.durable import digest_of
from fedsim.runs.directory import KEPT, RunDirectory, RunDirectoryError
from fedsim.runs.files import LOCK, SCHEMAS, DamagedRunError, SchemaError, check_schema
from fedsim.simulation.settings import TRACKERS

FILE = "manifest.json"
PAGES = ("report.html",)
RESUMED_FROM = (
    "checkpoint/",
    "environment.json",
    "experiment.yaml",
    "ledger.jsonl",
    "releases.jsonl",
    "rounds.jsonl",
)


class ManifestError(RunDirectoryError):
    """Error of a manifest that is missing, unreadable or changed."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`: SHA-256 of records and pages, by path in the directory."""

    records: Mapping[str, str]
    pages: Mapping[str, str]

    @property
    def root(self) -> str:
        """SHA-256 of the schema number and of `records`, as JSON with sorted keys and no spaces."""
        return digest_of({"records": dict(self.records), "schema": SCHEMAS[FILE]})

    def to_text(self) -> str:
        """Return the text of `manifest.json`; `read_manifest` accepts only this exact text."""
        content = {
            "schema": SCHEMAS[FILE],
            "records": dict(sorted(self.records.items())),
            "root": self.root,
            "pages": dict(sorted(self.pages.items())),
        }
        return json.dumps(content, indent=2) + "\n"


def write_manifest(directory: RunDirectory) -> None:
    """Write `manifest.json` for an ended run, as the last file of the run.

    Temporary files that a crash left behind are removed first. Symbolic links are not listed.
    """
    paths = set(_files(directory.path))
    leftovers = {path for path in paths if PurePosixPath(path).match(".*.tmp")}
    for path in leftovers:
        (directory.path / path).unlink()
    digests = ((path, _digest(directory.path / path)) for path in paths - leftovers)
    records = {path: digest for path, digest in digests if digest is not None}
    pages = {path: records.pop(path) for path in PAGES if path in records}
    directory.write_text(FILE, Manifest(records, pages).to_text())


def list_again(directory: RunDirectory, path: str) -> None:
    """Write the new digest of one page, or of a record added after the run, into the manifest.

    A run that was killed has no manifest; nothing is written then.
    """
    if not (directory.path / FILE).exists():
        return
    manifest, kind = read_manifest(directory), "pages" if path in PAGES else "records"
    listed = {**getattr(manifest, kind), path: _digest(directory.path / path)}
    directory.write_text(FILE, replace(manifest, **{kind: listed}).to_text())


def read_manifest(directory: RunDirectory) -> Manifest:
    """Return the manifest of a run; a missing, changed or other one raises a ManifestError."""
    if (directory.path / FILE).is_symlink():
        raise ManifestError(f"{FILE} is a link, and fedsim wrote a file")
    try:
        data = (directory.path / FILE).read_bytes()
    except FileNotFoundError:
        raise ManifestError(f"{FILE} is missing") from None
    except OSError as error:
        raise ManifestError(f"{FILE} cannot be read: {error.strerror}") from error
    try:
        content: dict[str, Any] = json.loads(data)
        check_schema(directory.path / FILE, content)
        manifest = Manifest(content["records"], content["pages"])
        same = manifest.to_text().encode() == data
    except SchemaError as error:
        raise ManifestError(str(error)) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ManifestError(f"{FILE} was changed: it is no manifest ({error!r:.80})") from error
    if not same:
        raise ManifestError(f"{FILE} was changed: it is not the text that fedsim wrote")
    return manifest


def refuse_changed_records(directory: RunDirectory) -> None:
    """Check before a run is resumed that the files from which it resumes are those in its manifest.

    A DamagedRunError names a file that was changed. A killed run has no manifest, and nothing is
    checked.
    """
    if not (directory.path / FILE).exists():
        return
    try:
        records = read_manifest(directory).records
    except ManifestError as error:
        raise DamagedRunError.of(directory.path, str(error)) from error
    for path, digest in records.items():
        if path.startswith(RESUMED_FROM) and _digest(directory.path / path) != digest:
            raise DamagedRunError.of(directory.path / path, f"changed after {FILE} was written")


def root_of(directory: RunDirectory) -> str | None:
    """Return the digest of all records in the manifest; None for a run without a manifest."""
    return read_manifest(directory).root if (directory.path / FILE).exists() else None


def changed_files(
    directory: RunDirectory, manifest: Manifest, *, pages: bool = True
) -> Iterator[str]:
    """Yield one line of text for each file that was changed, is missing or is not in the manifest.

    If the whole folder `checkpoint/` is absent, its files do not count as missing.
    """
    listed = {**manifest.records, **manifest.pages}
    present = set(_files(directory.path))
    if not (directory.path / KEPT).is_dir():  # who shares a run keeps it back
        listed = {path: digest for path, digest in listed.items() if not path.startswith(KEPT)}
    for path in sorted(listed.keys() | present):
        if path in PAGES and not pages:
            continue
        name = path if path.isprintable() else ascii(path)
        way_out = f"; write it again with fedsim report {directory.path}" if path in PAGES else ""
        if path not in listed:
            yield f"{name}: not listed in {FILE}{way_out}"
        elif path not in present:
            yield f"{name}: listed in {FILE} and missing{way_out}"
        elif _digest(directory.path / path) != listed[path]:
            yield f"{name}: changed after {FILE} was written{way_out}"


def _files(directory: Path, folder: str = "") -> Iterator[str]:
    """Yield the paths of all files that a manifest covers; links are not followed."""
    with scandir(directory / folder) as entries:
        for entry in entries:
            path = f"{folder}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if path not in TRACKERS:
                    yield from _files(directory, f"{path}/")
            elif path not in (FILE, LOCK):
                yield path


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a regular file; None for a link or anything else."""
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
